"""Every transport, on the stock event loop and on uvloop."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop

from aiodist.testing.conformance import LinkConformance
from aiodist.transports import bundle
from aiodist.transports.base import Transport
from aiodist.transports.inproc import InprocTransport
from aiodist.transports.shm import ShmTransport
from aiodist.transports.tcp import TcpTransport
from aiodist.transports.unix import UnixTransport


class TestInproc(LinkConformance):
    in_pieces = False

    def transport(self) -> Transport:
        return InprocTransport()


class TestTcp(LinkConformance):
    def transport(self) -> Transport:
        return TcpTransport()


class BundledTcp(TcpTransport):
    """Takes every peer for one that is far, and every connection for one that needs others."""

    def _is_far(self, sock: socket.socket) -> bool:
        return True

    def _wants_bundle(self, sock: socket.socket) -> bool:
        return True


class TestBundledTcp(LinkConformance):
    @pytest.fixture(autouse=True)
    def _use_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bundle, "EVENTS", 0)  # once one is full, and not for what it loses

    def transport(self) -> Transport:
        return BundledTcp()


class TestUnix(LinkConformance):
    def transport(self) -> Transport:
        return UnixTransport()


class TestInprocOnUvloop(TestInproc):
    def new_loop(self) -> asyncio.AbstractEventLoop:
        return uvloop.new_event_loop()


class TestTcpOnUvloop(TestTcp):
    def new_loop(self) -> asyncio.AbstractEventLoop:
        return uvloop.new_event_loop()


class TestBundledTcpOnUvloop(TestBundledTcp):
    def new_loop(self) -> asyncio.AbstractEventLoop:
        return uvloop.new_event_loop()


class TestUnixOnUvloop(TestUnix):
    def new_loop(self) -> asyncio.AbstractEventLoop:
        return uvloop.new_event_loop()


class TestShm(LinkConformance):
    def transport(self) -> Transport:
        return ShmTransport()


class TestShmOnUvloop(TestShm):
    def new_loop(self) -> asyncio.AbstractEventLoop:
        return uvloop.new_event_loop()
