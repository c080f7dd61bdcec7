"""The phases that programs are made of: where they run, which plan, on which memory.

A phase is one plan on one memory. It goes over links, or through the memory of a host, or both;
`lanes` chooses between the last two.
"""
