"""What launchers share: the environment of a rank, the report of its end, and the tie to its
parent.

There are two launchers: the `aiodist run` command, in `clients/aiodist_cli`, and the function
`aiodist.run`, in `aiodist.launch`. A rank gets a process group of its own, and dies with its parent
(`tether`).

If a rank dies, the others soon fail with `PeerLostError`. That is not what a user needs to see, so
both launchers look for a failure that is no consequence of another one.
"""
