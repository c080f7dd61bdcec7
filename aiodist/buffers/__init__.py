"""Memory of users: values as bytes on the wire and back, views of arrays, reduction kernels.

* `values`: any value of a user to metadata and the bytes of its arrays, and back.
* `vector`: flat arrays joined to one logical array.
* `reductions`, `kernels`, `custom`, `scalars`: what a reduction works on, and how.

Nothing here waits or does I/O. torch is imported only if the program has done so, or to make the
tensors that a peer sent.
"""
