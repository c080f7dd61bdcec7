"""Messages from one rank to another: sent, matched with receives, and kept within bounds.

`point_to_point` is the engine of one group, with a sending and a receiving half. `express` is a
short way for arrays of up to 64 KiB, if neither side has to wait.

Both send the same frames, and users see no difference. The engine matches messages with receives,
counts credit, queues messages and withdraws them. The short way keeps the header of each dtype and
shape. A send pays with credit, and writes header and data into the link. A receive looks for the
exact frame that it expects, as long as inline polls last, and takes the data from the link into its
own memory. If something else comes first, or something has to wait, the engine does the work.

**Large messages.** Up to some MiB, most of the time goes into the handshake. So as much as possible
is prepared. A receive that waits has a target ready for a message like the last one of its source.
Known metadata is looked up instead of read again. Messages of up to 1 MiB need no handshake if
receives wait: such a receive allows its sender to push the next message at once. In shared memory,
such a message also takes the short way, if the link has room for all of it. Its three frames are
written together, and the receiver copies the data while they come.

**No wakeup without need.** The receiver of credit or leave does not wait for it, but for an answer.
So these frames are held for a short while, to go with the answer (`frames.Wire.hold`). If other
programs want the cores, the receiver of a message is woken once, when the whole message is there.
Each wakeup may cost a time slice of another program then.

**Polling.** A link through shared memory polls for 150 µs after its last traffic, one turn of the
loop at a time, and then needs a bell. A rank that polls for longer than some microseconds yields
its core each time, because its peer may need that core.
"""
