"""Collectives of arrays on devices that have programs of their own: reductions, and loans.

They read the other ranks' arrays in place, or go through the host in sections. If all arrays are on
the host, the programs of `aiodist.collectives` do the work.
"""
