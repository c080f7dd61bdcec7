"""Channels of weights: a publisher has versions, and any number of subscribers take them, whole.
Publishers and subscribers may come and go.

There is no group of all: one that is stopped would hold up the others. Each participant is a group
of its own, of one rank, and all of these have a store in common (`aiodist.channels.participant`),
which says what there is and who has it (`aiodist.channels.directory`). Bytes go from one to one:
for each version that one takes from another there is a group of these two
(`aiodist.channels.transfers`), whose deadlines and losses are those of any group.
"""
