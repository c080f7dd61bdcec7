"""Memory of users: values as bytes on the wire and back, views of arrays, reduction kernels.

* `values`: any value of API section 3 → metadata and the bytes of its arrays, and back.
* `vector`: flat arrays joined to one logical array.
* `operands`, `kernels`, `custom`, `scalars`: what a reduction works on, and how.

Nothing in here waits, or does I/O. torch is never imported before its user has done so, except to
make the tensors that a peer sent.
"""
