# What aiodist uses of msgpack, which has no type hints of its own: pyright would infer from its
# source that packing may give None. Found by pyright's `stubPath`.

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

class ExtType(NamedTuple):
    code: int
    data: bytes

class Timestamp: ...

class Packer:
    def __init__(
        self,
        *,
        default: Callable[[Any], Any] | None = ...,
        use_bin_type: bool = ...,
        strict_types: bool = ...,
        unicode_errors: str = ...,
        autoreset: bool = ...,
    ) -> None: ...
    def pack(self, obj: object) -> bytes: ...
    def bytes(self) -> bytes: ...

class Unpacker:
    def __init__(
        self,
        *,
        raw: bool = ...,
        unicode_errors: str = ...,
        strict_map_key: bool = ...,
        use_list: bool = ...,
        ext_hook: Callable[[int, bytes], Any] = ...,
        max_buffer_size: int = ...,
        max_array_len: int = ...,
        max_map_len: int = ...,
        max_ext_len: int = ...,
    ) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def feed(self, data: bytes | bytearray | memoryview) -> None: ...
    def unpack(self) -> Any: ...
    def tell(self) -> int: ...

def packb(
    obj: object,
    *,
    default: Callable[[Any], Any] | None = ...,
    use_bin_type: bool = ...,
    strict_types: bool = ...,
) -> bytes: ...
def unpackb(
    packed: bytes | bytearray | memoryview,
    *,
    raw: bool = ...,
    use_list: bool = ...,
    strict_map_key: bool = ...,
    ext_hook: Callable[[int, bytes], Any] = ...,
    max_array_len: int = ...,
    max_map_len: int = ...,
    max_ext_len: int = ...,
) -> Any: ...
