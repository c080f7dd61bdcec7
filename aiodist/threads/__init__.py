"""An event loop in a thread of its own, for programs that have none: one for each process.

`aiodist.connect_blocking` and the torch backend have their groups on it. `engine` is the way in for
other threads, `loop` the loop itself, in which a thread that waits for a result does the work.
"""
