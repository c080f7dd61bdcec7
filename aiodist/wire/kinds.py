"""Kinds of frames between ranks: the first field of every header.

========== =================================================================================
HELLO      [kind, magic, version, nonce]: Begins the greeting, from the side that connects.
CHALLENGE  [kind, nonce]: Answers HELLO.
PROOF      [kind, my mark, proof, links, came]: Shows that the side that connects is a member (see
           `aiodist.wire.proof`), and says how many links it has had with the other side, and how
           many frames have come over them.
HELLO_ACK  [kind, proof, links, came]: Shows and says the same of the other side. From then on,
           frames of the membership follow.
MESSAGE    [kind, context, tag, seq, slot, call] + payload: Carries the data of one `Send` of a
           collective's plan.
GRANT      [kind, context, tag, seq, upto, call]: Allows the peer to send the slots below `upto`;
           if that is 0, only says what was called (`aiodist.engine.roll_call`).
ABORT      [kind, context, tag, seq, reason, text, rank, details, untold]: Says that `rank` has
           given the collective up. It cannot reach the ranks `untold`: pass it on to them.
INQUIRE    [kind, context, tag, seq]: Asks whether the peer has entered the collective.
STATUS     [kind, context, tag, seq, entered, text]: Answers INQUIRE, and says what its sender is
           doing.
KNOCK      [kind, context, tag, seq]: Announces much data for a collective, and asks to be told when
           the peer has entered it.
ADMIT      [kind, context, tag, seq]: Answers KNOCK, once the collective was entered.
P2P        [kind, context, …]: Carries all that point to point needs, see
           `aiodist.p2p.point_to_point`.
TAGS       [kind, context, …]: Has the ranks agree which tags can be forgotten, see
           `aiodist.engine.tags`.
KICK       [kind, context]: Wakes a peer that sleeps, because what it waits for in shared memory may
           be there.
REGION     [kind, context, number, address, key, nbytes]: Offers an array of the sender, which the
           peer is to map.
MAPPED     [kind, context, number]: Says that the sender has mapped the peer's array.
UNMAP      [kind, context, number]: Says that the sender's array is gone.
REVOKE     [kind, context, rank]: Says that `rank` has revoked the group.
DEVICE     [kind, context, word, number]: Tells of work on devices, see `aiodist.devices.memory`.
FAREWELL   [kind, context, reason]: Says that the sender has left the group, or all groups, at once,
           if `context` is b"".
========== =================================================================================

`context` (8 bytes) names one group in one epoch. `tag` is the user's (None, str or int), or bytes
for aiodist's own collectives. `seq` counts the collectives of a tag. `call` is what the sender
called, in words: it is compared before data counts, and shown when it differs.
"""

from __future__ import annotations

from typing import Final

MAGIC: Final = "aiodist"
VERSION: Final = 2

HELLO: Final = 1
HELLO_ACK: Final = 2
MESSAGE: Final = 3
GRANT: Final = 4
ABORT: Final = 5
INQUIRE: Final = 6
STATUS: Final = 7
P2P: Final = 8
TAGS: Final = 9
FAREWELL: Final = 10
KNOCK: Final = 11
ADMIT: Final = 12
KICK: Final = 13
REGION: Final = 14
MAPPED: Final = 15
UNMAP: Final = 16
CHALLENGE: Final = 17
PROOF: Final = 18
REVOKE: Final = 19
DEVICE: Final = 20
