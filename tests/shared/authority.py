"""Certificates for tests of TLS."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

Contexts = tuple[ssl.SSLContext, ssl.SSLContext]
"""Of a client, and of a server."""


class Authority:
    """Issues certificates, with the command openssl. Skips the test if there is none."""

    def __init__(self, folder: Path) -> None:
        openssl = shutil.which("openssl")
        if openssl is None:
            pytest.skip("no openssl command to make certificates with")
        self._openssl = openssl
        self._folder = folder
        self._run("req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
                  "-subj /CN=test-ca -keyout ca.key -out ca.pem")  # fmt: skip

    def _run(self, arguments: str) -> None:
        command = [self._openssl, *arguments.split()]
        subprocess.run(command, cwd=self._folder, check=True, capture_output=True, timeout=30)

    def contexts(
        self, name: str, *, mutual: bool, san: str = "IP:127.0.0.1", days: int = 2
    ) -> Contexts:
        """Of a rank that has a certificate of this authority, and trusts those that have one.

        `san`: whom the certificate is for. `days`: how long it is valid.
        """
        self._run(f"req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes "
                  f"-subj /CN={name} -keyout {name}.key -out {name}.csr")  # fmt: skip
        (self._folder / "san").write_text(f"subjectAltName={san}")
        self._run(f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial "
                  f"-days {days} -extfile san -out {name}.pem")  # fmt: skip
        ca, pem, key = [self._folder / one for one in ("ca.pem", f"{name}.pem", f"{name}.key")]
        client = ssl.create_default_context(cafile=ca)
        server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca)
        server.load_cert_chain(pem, key)
        if mutual:
            client.load_cert_chain(pem, key)
            server.verify_mode = ssl.CERT_REQUIRED
        return client, server
