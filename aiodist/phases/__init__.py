"""The phases that programs are made of.

A phase runs one plan on one memory. It uses links, the shared memory of a host, or both. `lanes`
chooses the phases that use shared memory.

**Groups that span hosts** have a lane on each host, for its ranks. All lanes are set up together:
either every host with several ranks has one, or all ranks use links alone. Operations of such a
group run *mixed* plans (`aiodist.schedules.team_whole` and the modules like it). Their steps use
shared memory inside a host and links between hosts.

A rank has to look at the abort words before it sends what it read from shared memory to another
host. Otherwise the other host could not tell that the memory was overwritten meanwhile.
"""
