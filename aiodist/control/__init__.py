"""The member's side of the control plane: its connection to the coordinator.

The `ControlClient` is one membership, and survives restarts of the coordinator. The `Store` of a
group and the renewal of the lease use the same connection.
"""
