"""The members of each group, decided by a state machine without I/O, clock or randomness."""
