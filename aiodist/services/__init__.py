"""Groups that go on when members die or join: what programs and services put around `connect`.

`aiodist.epochs` gives one group after the other for as long as this rank takes part. A rank that
dies is left behind, and a rank that comes is taken in. `aiodist.lifespan` does the same beside the
requests of a web service. Nothing here imports a web framework, because the frameworks call us.
"""
