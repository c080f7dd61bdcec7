"""A group for threads: the same operations as ordinary calls.

`Group.blocking` gives one to threads beside the group's loop. `aiodist.connect_blocking` joins one
for a program without a loop. `calls` runs a call on the loop and waits for its result. `group` and
`store` have the operations.
"""
