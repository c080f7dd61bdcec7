"""The links between ranks: made when first needed, kept through broken connections, given up when
a peer is lost.

The `Endpoint` is one rank's end of all of them. It shows peers that this rank is a member, hands
the frames that come to the groups that they are for, and says who is gone.
"""
