"""The options of commands that reach a coordinator over TLS."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from aiodist.transports.certificates import CA, CERT, KEY

Ca = Annotated[
    str | None,
    typer.Option(
        "--tls-ca",
        metavar="FILE",
        envvar=CA,
        help="The authority of the certificate of a tls:// coordinator.",
    ),
]
Cert = Annotated[
    str | None,
    typer.Option("--tls-cert", metavar="FILE", envvar=CERT, help="The certificate to show to it."),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--tls-key", metavar="FILE", envvar=KEY, help="Its key, if it is in another file."
    ),
]


def use(ca: str | None, cert: str | None, key: str | None) -> None:
    """Set the environment variables that connections read, and that started processes inherit."""
    for name, file in ((CA, ca), (CERT, cert), (KEY, key)):
        if file is not None:
            os.environ[name] = file
