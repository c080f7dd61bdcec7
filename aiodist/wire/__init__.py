"""What crosses the wire: frames, control messages, limits. No I/O in here."""
