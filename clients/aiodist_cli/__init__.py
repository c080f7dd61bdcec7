"""The `aiodist` command: starts ranks, serves and inspects groups."""
