"""The check of all data that crosses a link: CRC-32, by the fastest installed library.

All libraries compute the same number, so participants may use different ones. zlib-ng (the extra
`weights`) checks 25 GB/s, and Python's zlib 4 GB/s, which takes as long as sending the bytes. Both
release the GIL.
"""

from __future__ import annotations

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
