"""Files in and out of a channel of weights: what `aiodist weights push` and `pull` do."""
