"""Ranks as a grid or as a graph, and collectives among neighbours.

A layer above groups. It works with asyncio groups and blocking groups alike, because it uses only
what a program can use. `grid` numbers ranks by coordinates, `graph` takes the neighbours that each
rank names, and `neighbors` has what both share.
"""
