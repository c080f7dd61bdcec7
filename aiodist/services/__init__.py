"""Groups that outlive their members: what programs and services put around `connect`.

`aiodist.epochs` gives one group after the other, for as long as this rank takes part: who dies is
left behind, who comes is taken in. `aiodist.lifespan` does that beside the requests of a web
service. No web framework is imported here: they call what they are given.
"""
