"""Options of commands that listen: who may come in, and what they may do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

_FILE: Final = click.Path(exists=True, dir_okay=False, readable=True)


def security_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command ``tls_cert``, ``tls_key``, ``tls_client_ca``, ``users``, ``acls`` and ``insecure``."""
    for option in reversed((
        click.option("--tls-cert", type=_FILE, metavar="FILE", help="Certificate, PEM: encrypt."),
        click.option("--tls-key", type=_FILE, metavar="FILE", help="Its private key, PEM."),
        click.option("--tls-client-ca", type=_FILE, metavar="FILE",
                     help="Take only clients with a certificate of these."),
        click.option("--users", type=_FILE, metavar="FILE", help="Take only these users (see `segmentlog users`)."),
        click.option("--acls", type=_FILE, metavar="FILE",
                     help="What they may do; whatever it does not allow is denied."),
        click.option("--insecure", is_flag=True, help="Listen beyond this machine without TLS or users."),
    )):  # fmt: skip
        command = option(command)
    return command
