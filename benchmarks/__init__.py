"""Measurements of aiodist beside its peers: ``python -m benchmarks`` (or ``make bench``).

What is measured, and how fast aiodist is asked to be, is in `asked`; how it is measured is in
`aiodist_cli.bench_*`, the one engine behind this command and ``aiodist bench``. What is added here:
libraries to measure (`wire`, `links`), and orders to ranks (`orders`, `ddp`, `tensor_parallel`,
`resharding`).
"""
