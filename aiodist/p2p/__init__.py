"""Messages from one rank to another: sent, matched with receives, and kept within bounds.

`point_to_point` is the engine of one group, with a sending and a receiving half. `express` is the
short way of arrays that are not large, for which nothing waits on either side.

The two look the same from outside, and on the wire. The engine matches messages with receives,
keeps the books of credit, queues and withdraws. The short way is what is left of that for an array
of up to 64 KiB when nothing waits. The frame up to its data is kept for each dtype and shape. A
send pays with its credit, and writes frame and data into the link. A receive looks for the very
frame that it expects, for as long as inline polls last, and takes the data from the link into its
own memory. Whatever else comes first, and whatever has to wait, is left to the engine.

**Large messages.** Up to some MiB, most of the time goes into the handshake. So what can be made
before it is made before: a receive that waits has its target ready for a message like the last one
of its source, and metadata that was seen before is looked up instead of read again. And up to 1 MiB
there is none at all where receives wait: each that did gives leave to send the next one at once.
In shared memory, where a link has room for all of it, such a message goes the short way, too: its
three frames are written in one piece, and the receiver copies the data while they come.

**Nobody is woken in vain.** Credit and leave are frames that their receiver does not wait for: it
waits for an answer. So they are held back for the answer, a short while (`frames.Wire.hold`). And
where other programs want the cores, the receiver of a message is woken once, when all of it is
there: each time that somebody is woken there may cost a time slice of another program.

**Polling.** A link through shared memory goes on looking for 150 µs after its last traffic, one
turn of the loop at a time, before it falls asleep and needs a bell. Whoever polls for longer than
some microseconds yields the core each time, for the peer may be waiting for that core.
"""
