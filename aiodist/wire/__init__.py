"""What crosses the wire: frames, control messages, limits. Pure: no I/O."""
