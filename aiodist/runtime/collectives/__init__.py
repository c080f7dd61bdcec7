"""The collectives as programs: which plans run on which memory, one after the other.

Every program begins with a phase in which each rank hears, directly or not, from all others, so
that none completes before all have entered it.
"""
