"""The memory that ranks of one host share: what each may write, what the others see of it, and who
waits for whom.

A `Lane` runs the collectives of a group one after the other, by words on a `Board` that every rank
has for itself to write. The `Heap` has the arrays that users ask for with `Group.empty`.
"""
