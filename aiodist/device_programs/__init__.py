"""Collectives of arrays on devices that have programs of their own: reductions, and loans.

They read the other ranks' arrays where they lie, or go by way of the host in sections. Where all
arrays turn out to be of the host, the programs of `aiodist.collectives` do the work.
"""
