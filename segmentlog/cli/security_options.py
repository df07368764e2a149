"""Options of commands that listen: TLS, users and access control."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

_FILE: Final = click.Path(exists=True, dir_okay=False, readable=True)


def security_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``tls_cert``, ``tls_key``, ``tls_client_ca``, ``users``, ``acls`` and ``insecure`` to a command."""
    for option in reversed((
        click.option("--tls-cert", type=_FILE, metavar="FILE", help="Certificate (PEM). Enables TLS."),
        click.option("--tls-key", type=_FILE, metavar="FILE", help="Private key of the certificate (PEM)."),
        click.option("--tls-client-ca", type=_FILE, metavar="FILE",
                     help="Require a client certificate signed by one of these CAs."),
        click.option("--users", type=_FILE, metavar="FILE", help="Require a login by one of these users (see"
                                                                 " `segmentlog users`)."),
        click.option("--acls", type=_FILE, metavar="FILE",
                     help="ACL file. Operations without a matching rule are denied."),
        click.option("--insecure", is_flag=True, help="Allow listening beyond this machine without TLS or users."),
    )):  # fmt: skip
        command = option(command)
    return command
