"""Messages from one rank to another: sent, matched with receives, and kept within bounds.

`point_to_point` is the engine of one group, with a sending and a receiving half. `express` is the
short way of small arrays, for which nothing waits on either side.
"""
