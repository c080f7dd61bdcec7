"""Measurements of aiodist beside its peers: ``python -m benchmarks`` (or ``make bench``).

What is measured, and how fast aiodist is asked to be, is in `asked`; how it is measured is in
`aiodist_cli.bench_*`, which ``aiodist bench`` uses as well.
"""
