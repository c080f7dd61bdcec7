"""Doing it: the matching engine, links to peers, the executor of plans, the control plane."""
