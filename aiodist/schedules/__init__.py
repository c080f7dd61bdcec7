"""Algorithms as pure plans: what each rank sends, receives, reduces and copies, in which order."""
