"""What launchers share: the environment of a rank, how its end is told, and how its life is tied to
that of its parent.
"""
