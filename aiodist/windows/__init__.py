"""Windows: memory of one rank that the other ranks read and write (one-sided operations).

`window` has the calls, and the task on the owner's loop that carries them out. `places` finds the
part of the memory that an index means. docs/windows.md says what a program can rely on.
"""
