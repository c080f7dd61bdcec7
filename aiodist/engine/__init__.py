"""The engine of one group: it runs collectives step by step as frames come in, and sees to it that
all ranks hear how each of them ends.

An `Operation` is one collective on one rank. Around it are what has come before it was called, the
numbers by which ranks match their calls, verdicts, and deadlines.
"""
