"""The coordinator as a daemon: ``aiodist coordinator``."""

from aiodist_server.config import Config
from aiodist_server.daemon import serve

__all__ = ["Config", "serve"]
