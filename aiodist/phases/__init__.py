"""The phases that programs are made of: where they run, which plan, on which memory.

A phase is one plan on one memory. It goes over links, or through the memory of a host, or both;
`lanes` chooses between the last two.

**Groups that span hosts** have a lane on each host, for the ranks that are there. All lanes are set
up together: either every host with several ranks has one, or all ranks use links alone. The
operations of such a group run *mixed* plans (`aiodist.schedules.team_whole` and its siblings),
whose steps use shared memory inside a host and links between hosts. What a rank has read from
shared memory may leave its host only after a look at the abort words, for nobody elsewhere could
tell that it was overwritten meanwhile.
"""
