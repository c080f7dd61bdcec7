"""Ways for frames to travel between two ranks. Each passes `aiodist.testing.conformance`."""
