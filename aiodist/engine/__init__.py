"""The engine of one group: it runs collectives step by step as frames come in, and sees to it that
all ranks hear how each of them ends.

An `Operation` is one collective on one rank, from its call to its end. It has the frames that it
exchanges with its peers (`exchange`) and the executor of the phase that runs. Around it are what
has come before it was called, the numbers by which ranks match their calls, verdicts, and
deadlines.

**A call.** A collective checks its arguments, asks `aiodist.schedules` for a plan, and runs it at
once as far as it goes without waiting. The rest goes on whenever frames arrive, in turns of the
event loop. The future that the call has returned is done when all ranks have entered the collective
and this rank's plan is through.

**Matching** is by epoch, tag and sequence number. Each operation carries a fingerprint of what was
called. So ranks that call different things learn it, instead of waiting for ever.

**One executor** runs the steps of all plans, those with links, those in shared memory and the mixed
ones of groups that span hosts: it waits for a frame or for a stamp, whichever comes next
(`executor`). The same one runs collectives that are done within their call
(`aiodist.prepared.express`). A few functions do the whole of a short plan in one go, for speed:
in shared memory `executor.all_at_once` and `executor.in_steps`, and the like for values
(`aiodist.prepared.lane_values`) and over links (`aiodist.prepared.link_express`). Tests hold
them to what the executor does.
"""
