"""The collectives as programs: each has one or more phases, one after the other.

In the first phase of every program each rank hears from all others, directly or through others. So
no rank completes before all have entered.
"""
