"""The engine of one group.

It runs collectives step by step as frames come in, and makes sure that all ranks hear how each
collective ends.

An `Operation` is one collective on one rank, from its call to its end. It has the frames that it
exchanges with its peers (`exchange`), and the executor of its current phase. The other modules keep
early frames, number the calls, spread verdicts and watch deadlines.

**A call.** A collective checks its arguments, asks `aiodist.schedules` for a plan, and runs the
plan at once until a step has to wait. Later frames make it go on, in turns of the event loop. The
call has returned a future. It is done when all ranks have entered the collective and this rank's
plan is complete.

**Matching** is by epoch, tag and sequence number. Each operation carries a fingerprint of what was
called, so that ranks that call different things get an error instead of waiting for ever.

**One executor** runs the steps of all plans: over links, in shared memory, and both for groups that
span hosts. It waits for a frame or a stamp, whichever the next step needs (`executor`). It also
runs collectives that are done within their call (`aiodist.prepared.express`).

Some functions run a whole short plan at once, because that is faster: `executor.all_at_once` and
`executor.in_steps` in shared memory, `aiodist.prepared.lane_values` for values, and
`aiodist.prepared.link_express` over links. Tests compare them with the executor.
"""
