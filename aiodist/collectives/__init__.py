"""The collectives as programs: which phases they have, one after the other.

Every program begins with a phase in which each rank hears, directly or not, from all others, so
that none completes before all have entered it. `express` and `link_express` do small ones within
the call, `multihost_express` those of groups that span hosts, and `lane_setup` has the ranks of a
host agree on the memory that they share.
"""
