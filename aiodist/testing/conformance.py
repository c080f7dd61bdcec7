"""What every transport must do, as tests. Test your own transport like this::

    class TestMine(LinkConformance):
        def transport(self) -> Transport:
            return MyTransport()

The tests are plain methods, without a pytest plugin. Each has an event loop of its own from
`new_loop`. None of them sleeps or reads a clock, except to stop if something hangs.
"""

from __future__ import annotations

from aiodist.testing.conformance_ends import EndTests
from aiodist.testing.conformance_frames import FrameTests


class LinkConformance(FrameTests, EndTests):
    """Subclass it and give `transport`. Set `in_pieces = False` if payloads always come whole."""
