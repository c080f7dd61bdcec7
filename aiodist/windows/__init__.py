"""Memory of a rank that the others read and write: one-sided operations.

`window` has the calls, and the service on the owner's loop that carries them out; `places` says
which part of the memory is meant. docs/windows.md says what holds.
"""
