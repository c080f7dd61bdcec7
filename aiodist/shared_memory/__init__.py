"""Shared memory for the ranks of one host.

If the ranks of a group are processes of one host, they exchange data in memory instead of over
sockets. Each rank writes its own memory, and the others map it to read. There are four ways to use
it:

- A `Lane` runs the collectives without a tag, one after the other. It uses words on a `Board`.
- `Posts` carry small data of collectives with a tag. These have no common order, so they cannot use
  the lane.
- `Berths` are lanes that are lent to one large collective with a tag.
- The `Heap` holds the arrays that users ask for with `Group.empty`.

**Memory.** In each group a rank has a page of 64-bit words, three areas of staging memory and a
ring of posts. Together they take 24.3 MiB at most, for arrays of any size (`board.LANE`). Each
large collective with a tag takes 14.3 MiB more while it runs (`board.BERTH`), and at most eight of
them run at once. Pages that are never written take no memory.

**Waiting.** One of the words, the *stamp*, says how far its rank is. A rank that waits polls the
stamps of the others for some ten microseconds. Then it says that it sleeps. At first it sleeps
within the call, and the kernel wakes it when a word changes (`futex`). After that it lets the event
loop go on. Of the ranks that the sleeper needs, the last one wakes it by the futex or by a frame.

**Aborts.** No rank writes the memory of another. So if a rank is cancelled or fails, it only has to
write its *abort word* before it releases its buffers. Other ranks check this word after their last
read.

**The same as on links.** Operations match, compare fingerprints, time out and reach verdicts as
they do on links, and verdicts travel over the links. If an operation is given up before its turn,
the others pass over its number.

**Requirements.** The words need a processor that shows stores in program order (x86-64). On other
processors the ranks of a host use sockets. Ranks within one event loop use queues of that loop.
"""
