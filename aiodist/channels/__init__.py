"""Channels of weights: a publisher has versions, and any number of subscribers take them, whole.

Publishers and subscribers may come and go. There is no group of all of them, because one that is
stopped would hold up the others. Each participant is a group of one, and all share a store
(`aiodist.channels.store`), which lists the versions and their holders
(`aiodist.channels.directory`). Bytes go from one participant to another in a group of these two
(`aiodist.channels.transfers`), with the deadlines and losses of any group.
"""
