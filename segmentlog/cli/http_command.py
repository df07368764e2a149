"""``segmentlog http``: serve the console, REST and the schema registry for a store."""

from __future__ import annotations

import os
import signal

import click

from segmentlog.cli.common import exit_at_once_on_signals, open_store, require_local_folder, say
from segmentlog.cli.option_types import LIMITED_SIZE
from segmentlog.cli.security_options import security_options


@click.command()
@click.option(
    "--listen", default="127.0.0.1:8080", show_default=True, metavar="HOST:PORT", help="Address to listen on."
)
@click.option("--allow-writes", is_flag=True,
              help="Allow changes to topics, groups and transactions; without it the server is read-only.")  # fmt: skip
@click.option("--allowed-host", "allowed_hosts", multiple=True, metavar="NAME",
              help="Additional Host header to accept when authentication is off.")  # fmt: skip
@security_options
@click.option("--max-request", type=LIMITED_SIZE, default="100MiB", show_default=True, metavar="SIZE",
              help="Maximum size of a request body.")  # fmt: skip
@click.option("--max-connections", type=click.IntRange(1), default=400, show_default=True,
              help="Maximum number of connections; one address may have three quarters.")  # fmt: skip
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True,
              help="Format of log lines.")  # fmt: skip
@click.pass_context
def http(
    ctx: click.Context, listen: str, allow_writes: bool, allowed_hosts: tuple[str, ...], tls_cert: str | None,
    tls_key: str | None, tls_client_ca: str | None, users: str | None, acls: str | None, insecure: bool,
    max_request: int, max_connections: int, log_format: str,
) -> None:  # fmt: skip
    """Serve the store over HTTP: a console for browsers, REST and the schema registry.

    Other processes can use the store at the same time. `segmentlog serve --http` adds the same server to a Kafka
    server.

    SIGTERM and Ctrl-C finish running requests, then stop the server.
    """
    with exit_at_once_on_signals():
        from segmentlog.security.listen_rules import parse_address
        from segmentlog.security.security_settings import Security
        from segmentlog.server.log_format import set_up_logs

    host, port = parse_address(listen)
    security = Security(
        tls_cert=tls_cert, tls_key=tls_key, tls_client_ca=tls_client_ca, users=users, acls=acls, insecure=insecure
    )
    with exit_at_once_on_signals():
        from segmentlog.http.settings import HttpLimits, HttpSettings

        try:
            from segmentlog.http.serving import HttpServer
        except ImportError as error:
            raise click.ClickException(
                f"segmentlog http needs the extra 'http': run pip install '.[http]' in a clone of segmentlog ({error})"
            ) from None
    limits = HttpLimits(request_bytes=max_request, connections=max_connections)
    settings = HttpSettings(allow_writes=allow_writes, allowed_hosts=allowed_hosts, limits=limits)
    set_up_logs(log_format)
    if "://" not in ctx.obj:
        os.makedirs(require_local_folder(ctx), exist_ok=True)
    signals = {signal.SIGTERM, signal.SIGINT}
    former = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before threads start: no thread may receive them
    try:
        with (
            open_store(ctx, create="://" not in ctx.obj) as store,
            HttpServer(store, host, port, settings=settings, security=security) as server,
        ):
            say(f"{ctx.obj}: {server.url}")
            signal.sigwait(signals)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
    say("stopped")
