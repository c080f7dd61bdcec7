"""Limits of the control plane. A peer that exceeds one of them is refused.

They bound the coordinator's memory, whatever connects. Each is far above what a group needs, and
they fit together: the largest group with the largest metadata makes a view that fits into the
largest reply.
"""

from __future__ import annotations

from typing import Final

PROTOCOL_VERSION: Final = 6
"""Raised with every change of the control messages that an older peer cannot read."""

MAX_CONTROL_HEADER: Final = 16
"""The most bytes of the header of a control message: the msgpack array [type, request]."""

MAX_REQUEST: Final = 2**63 - 1
"""The highest number of a request. A member counts its requests for as long as it lives."""

MAX_BODY_BEFORE_WELCOME: Final = 1024
"""The most bytes of the body of a message from a connection that has not been let in."""

MAX_VALUE: Final = 1024 * 1024
"""The most bytes of one value in the store."""

MAX_STORE_BYTES: Final = 64 * 1024 * 1024
"""The most bytes of all keys and values of one group's store."""

MAX_STORE_KEYS: Final = 65536
"""The most keys in one group's store."""

MAX_KEY: Final = 1024
"""The most characters of a key."""

MAX_WAIT_KEYS: Final = 4096
"""The most keys in one `wait`."""

MAX_PENDING: Final = 1024
"""The most waits and watches that one member may have under way."""

MAX_WRITES: Final = 32
"""The most writes to the store that one member has under way. Further ones wait.

The coordinator remembers this many answers, in case the connection breaks before they arrive.
"""

MAX_BODY: Final = 2 * MAX_VALUE + 64 * 1024
"""The most bytes of the body of a request: `compare_set` carries two values."""

MAX_REPLY: Final = 64 * 1024 * 1024
"""The most bytes of the body of a reply, before and after unpacking.

The largest view stays below it: see MAX_MEMBERS.
"""

MAX_MEMBERS: Final = 4096
"""The most members of a group. Each takes at most 15 KiB of a view (8 KiB of metadata, 16 addresses
of 256 bytes, three texts), so 4096 of them stay below MAX_REPLY."""

MAX_METADATA: Final = 8192
"""The most bytes of a member's metadata, as msgpack."""

MAX_ADDRESSES: Final = 16
"""The most addresses that a member may advertise."""

MAX_NAME: Final = 256
"""The most characters of a name (of a group, member, host, run) or address."""

MAX_TEXT: Final = 4096
"""The most characters of a text for people."""

MAX_WAITS: Final = 8
"""The most operations that a member tells of when it is asked what it is doing."""

MAX_PLACES: Final = 5
"""The most lines of its program that a member tells of then, each at most MAX_NAME characters."""

MAX_SECONDS: Final = 10.0 * 365 * 86400
"""The longest duration that is accepted: ten years."""
