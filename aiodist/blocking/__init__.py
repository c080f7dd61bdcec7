"""A group for threads: the same operations as ordinary calls.

`Group.blocking` gives one to threads beside the group's loop; `aiodist.connect_blocking` joins one
for a program without a loop. `calls` is how a thread has something done on the loop and waits for
it, `group` and `store` are the operations by name.
"""
