"""The actor of one rank: it owns everything that a membership holds open, over all of its epochs.

`RankActor`, in `actor`, hears from the coordinator and tells the endpoint and the contexts. A
`Context` is one group in one epoch, put together from the rooms below. The other modules lead from
one epoch to the next, and tell what this rank is doing.
"""
