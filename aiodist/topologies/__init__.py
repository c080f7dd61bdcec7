"""Ranks as a grid or as a graph: who is whose neighbour, and collectives among neighbours.

A layer above groups, which it uses as a program does: whether they are those of asyncio or blocking
ones. `grid` numbers ranks by coordinates, `graph` takes neighbours as each rank names them,
`neighbors` is what the two have in common.
"""
