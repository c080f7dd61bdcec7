"""The collectives as programs: which phases they have, one after the other.

Every program begins with a phase in which each rank hears, directly or not, from all others. So no
rank completes before all have entered it.
"""
