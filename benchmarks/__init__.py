"""Measurements of aiodist beside its peers: ``python -m benchmarks`` (or ``make bench``)."""
