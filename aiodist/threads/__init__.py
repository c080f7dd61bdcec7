"""An event loop in a thread of its own, one for each process, for programs that have none.

The groups of `aiodist.connect_blocking` and of the torch backend live on it. `engine` is the way in
for other threads. `loop` is the loop itself: a thread that waits for a result does the loop's work.
"""
