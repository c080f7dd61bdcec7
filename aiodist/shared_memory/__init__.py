"""The memory that ranks of one host share: what each may write, what the others see of it, and who
waits for whom.

A `Lane` runs the collectives of a group one after the other, by words on a `Board` that every rank
has for itself to write. The `Heap` has the arrays that users ask for with `Group.empty`.

Where the ranks of a group are processes of one host, its collectives without a tag run in memory
that every rank has for itself to write and that the others map to read. Collectives with a tag have
no common order, which a lane needs: what is small of them is posted there (`Posts`), and what is
large has a lane of its own for as long as it takes (`Berths`).

**What there is.** Each rank has, for each group, a page of 64-bit words, three areas of staging
memory and a ring of posts: 20.3 MiB at most, however large the arrays are; and half of that again
for each large collective with a tag that is under way at once, eight at most. What was never
written takes nothing. The *stamp*, one of the words, says how far a rank is. Whoever waits looks at
the stamps of the others for some ten microseconds. Then it says that it sleeps: at first within the
call, where the kernel wakes it for a word in memory (`futex`); then it lets the event loop go on.
Of the ranks that a sleeper needs, the last one to come wakes it: it rings, or sends a frame.

**Nobody writes the memory of another rank.** So a rank that is cancelled, or fails, only has to say
so by its *abort word* before it lets go of its buffers. A rank that has read from it looks at that
word after its last read.

**What is the same as on links.** Matching, fingerprints, deadlines and verdicts are those of all
operations, and verdicts travel over the links. The others pass over an operation that was given up
before its turn, by its number.

**Where it works.** The words need a processor that shows stores in their order (x86-64). Elsewhere
the ranks of a host use sockets. Ranks within one event loop exchange through queues of that loop.
"""
