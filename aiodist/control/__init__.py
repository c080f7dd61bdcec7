"""The member's side of the control plane: what a rank says to the coordinator, and hears from it.

The `ControlClient` is one membership, also over a coordinator that goes away and comes back. The
`Store` of a group and the renewal of the lease go over the same connection.
"""
