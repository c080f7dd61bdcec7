"""Kinds of frames between ranks: the first field of every header.

========== =================================================================================
HELLO      [kind, magic, version, nonce]: the first frame, of who connects
CHALLENGE  [kind, nonce]: the answer
PROOF      [kind, my mark, proof, links, came]: I am a member, see `aiodist.wire.proof`, that has
           had so many links with you, over which so many frames have come
HELLO_ACK  [kind, proof, links, came]: so am I; from now on, frames of the membership
MESSAGE    [kind, context, tag, seq, slot, call] + payload: one `Send` of a collective's plan
GRANT      [kind, context, tag, seq, upto, call]: slots below `upto` may be sent
ABORT      [kind, context, tag, seq, reason, text, rank, details, untold]: the collective is given
           up by `rank`, which cannot reach the ranks `untold`: pass it on to them
INQUIRE    [kind, context, tag, seq]: have you entered it?
STATUS     [kind, context, tag, seq, entered, text]: the answer, and what I am doing
KNOCK      [kind, context, tag, seq]: I have much for it; tell me when you have entered
ADMIT      [kind, context, tag, seq]: the answer, then
P2P        [kind, context, …]: point to point, see `aiodist.p2p.point_to_point`
TAGS       [kind, context, …]: which tags can be forgotten, see `aiodist.engine.tags`
KICK       [kind, context]: wake up, what you wait for in shared memory may be there
REGION     [kind, context, number, address, key, nbytes]: an array of mine to be mapped
MAPPED     [kind, context, number]: I have mapped your array
UNMAP      [kind, context, number]: my array is gone
REVOKE     [kind, context, rank]: rank has revoked the group
DEVICE     [kind, context, word, number]: about work on devices, see `aiodist.devices.memory`
FAREWELL   [kind, context, reason]: I have left it; b"" for all: I leave at once
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
