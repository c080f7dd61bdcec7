"""What every transport must do, as tests. For one of your own::

    class TestMine(LinkConformance):
        def transport(self) -> Transport:
            return MyTransport()

The tests are plain methods (no pytest plugin is needed), each with an event loop of its own from
`new_loop`. None of them sleeps or looks at a clock, except to give up on what hangs.
"""

from __future__ import annotations

from aiodist.testing.conformance_ends import EndTests
from aiodist.testing.conformance_frames import FrameTests


class LinkConformance(FrameTests, EndTests):
    """Subclass it and give `transport`; `in_pieces = False` where payloads always come whole."""
