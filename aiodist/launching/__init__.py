"""What launchers share: the environment of a rank, how its end is told, and how its life is tied to
that of its parent.

Both launchers use it: the `aiodist run` command, in `clients/aiodist_cli`, and the function
`aiodist.run`, in `aiodist.launch`. A rank gets a process group of its own, and dies with its parent
(`tether`).

Of several failures, both launchers name the one that is no consequence of another. When a rank
dies, the others soon fail with `PeerLostError`, and that is not what a user needs to see.
"""
