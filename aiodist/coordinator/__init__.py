"""The coordinator: the actor that knows who is in which group, and their stores. No tensor ever
passes through it.

`Coordinator`, in `actor`, feeds the messages of its connections to the membership state machine,
and carries out the effects. With a state file it can be started again, and knows what it knew.
"""
