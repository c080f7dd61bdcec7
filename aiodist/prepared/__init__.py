"""Prepared collectives: calls like earlier ones, done within the call.

`express` says what holds for all of them. The first part of a module's name says what the ranks
share: a *lane* for calls without a tag, *posts* and *berths* for calls with one, *links*, or links
between hosts and a lane within each (*multihost*). `lane_setup` has the ranks of a host agree on
the memory that they share. `tapes` makes what the compiled part runs.
"""
