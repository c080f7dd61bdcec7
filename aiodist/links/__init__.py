"""The links between ranks: made when first needed, kept through broken connections, given up when
a peer is lost.

The `Endpoint` is one rank's end of all of them. It shows peers that this rank is a member, hands
the frames that come to the groups that they are for, and says who is gone.

**A link outlives its connection.** Between two members there is one stream of frames each way,
however many connections it takes. A link whose connection breaks is *severed*
(`aiodist.transports.lasting`): what it has to send waits, what has begun to come stays where it is,
and its keeper is told. The keeper is the `Peer`, which connects again. Meanwhile nobody above
notices: the link takes what is sent, and can be asked to discard it. The link over the new
connection *adopts* the state of the old one.

**The greeting** says how many links there have been and how many frames have come, and proves it. A
listener compares the number of links. So it can tell a new connection that replaces its own one,
which is broken though nobody here has noticed, from a connection that was under way before that.

**The end of a process** (`process_watch`) is not found by calling the process: on its host, a pidfd
tells. The pidfd is opened with the first link, right after the greeting. The greeting shows that
the process lived, so its number cannot be that of another process by then.

**Silence** (`aiodist.transports.silence`): four times in each lease, the kernel is asked when it
last heard from a peer to whom something was sent.
"""
