"""Prepared collectives: calls like earlier ones, done within the call.

`express` explains what all of them have in common. The first part of a module's name says what the
ranks share. It is a *lane* for calls without a tag, and *posts* and *berths* for calls with one. It
is *links* between hosts, or *multihost* for links between hosts and a lane within each host. With
`lane_setup`, the ranks of a host agree on the memory that they share. `tapes` describes a plan to
the compiled part.
"""
