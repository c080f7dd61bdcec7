"""Who is a member of which group: a state machine without I/O, clock or randomness."""
