"""Averagers: the mean of arrays of members that come and go. A slow member holds up no other one.

Each member is a group of one, so no member waits for another one to join or leave. The coordinator
decides which of them contribute to a round (`aiodist.membership.averaging`). These exchange slices
over the links between them (`aiodist.averaging.transfer`), in a context that is made for the round
without any message. `aiodist.averaging.parts` is what one member knows of the rounds of each part,
and `aiodist.averaging.averager` is what programs call.
"""
