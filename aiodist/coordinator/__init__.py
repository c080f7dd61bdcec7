"""The coordinator actor, which knows the members of all groups and their stores. No tensor passes
through it.

`Coordinator`, in `actor`, feeds the messages of its connections to the membership state machine,
and carries out the effects. With a state file, it keeps what it knows over restarts.
"""
