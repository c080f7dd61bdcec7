"""The links between ranks: made when first needed, kept over broken connections, ended with a peer.

The `Endpoint` is one rank's end of all links. It shows peers that this rank is a member, hands
frames to their groups, and tells which ranks are gone.

**A link outlives its connection.** Two members have one stream of frames each way, over any number
of connections. If the connection breaks, the link is *severed* (`aiodist.transports.lasting`): data
to send waits, received data stays, and the link's keeper is told. The keeper is the `Peer`, which
connects again. The layers above do not notice, because the link still accepts frames and requests
to discard them. The link over the new connection *adopts* the state of the old one.

**The greeting** tells, with a proof, how many links there have been and how many frames have come.
The listener compares the number of links. So it can tell two kinds of new connections apart: one
that replaces the present connection, and one that was begun before it. The first shows that the
present one is broken, even if this rank has not noticed.

**The end of a process** (`process_watch`) shows through a pidfd on its host. The pidfd is opened
with the first link, right after the greeting, because the greeting shows that the process lives. So
its number cannot belong to another process yet.

**Silence** (`aiodist.transports.silence`): four times in each lease we ask the kernel when it last
heard from a peer that was sent something.
"""
