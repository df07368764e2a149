"""``segmentlog http``: pages for people, REST and the schema registry over the store."""

from __future__ import annotations

import os
import signal

import click

from segmentlog.cli.common import loading, open_store, say, store_folder
from segmentlog.cli.option_types import LIMITED_SIZE
from segmentlog.cli.security_options import security_options


@click.command()
@click.option("--listen", default="127.0.0.1:8080", show_default=True, metavar="HOST:PORT", help="Where it answers.")
@click.option("--allow-writes", is_flag=True,
              help="Let people change topics, groups and transactions, not only look.")  # fmt: skip
@click.option("--allowed-host", "allowed_hosts", multiple=True, metavar="NAME",
              help="A further name that it is asked for by, where nobody has to say who he is.")  # fmt: skip
@security_options
@click.option("--max-request", type=LIMITED_SIZE, default="100MiB", show_default=True, metavar="SIZE",
              help="The largest request that is taken.")  # fmt: skip
@click.option("--max-connections", type=click.IntRange(1), default=400, show_default=True,
              help="At a time; three quarters of them of one address.")  # fmt: skip
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def http(
    ctx: click.Context, listen: str, allow_writes: bool, allowed_hosts: tuple[str, ...], tls_cert: str | None,
    tls_key: str | None, tls_client_ca: str | None, users: str | None, acls: str | None, insecure: bool,
    max_request: int, max_connections: int, log_format: str,
) -> None:  # fmt: skip
    """Show the store to people, and let programs in that speak HTTP.

    Other processes go on using the store meanwhile. `segmentlog serve --http` does the same beside Kafka's protocol.
    SIGTERM and Ctrl-C finish what is in flight.
    """
    with loading():
        from segmentlog.security.listen_rules import parse_address
        from segmentlog.security.security_settings import Security
        from segmentlog.server.log_format import set_up_logs

    host, port = parse_address(listen)
    security = Security(
        tls_cert=tls_cert, tls_key=tls_key, tls_client_ca=tls_client_ca, users=users, acls=acls, insecure=insecure
    )
    with loading():
        from segmentlog.http.settings import HttpLimits, HttpSettings

        try:
            from segmentlog.http.serving import HttpServer
        except ImportError as error:
            wanted = "this needs the extra 'http': pip install '.[http]' in a clone of segmentlog"
            raise click.ClickException(f"{wanted} ({error})") from None
    limits = HttpLimits(request_bytes=max_request, connections=max_connections)
    settings = HttpSettings(allow_writes=allow_writes, allowed_hosts=allowed_hosts, limits=limits)
    set_up_logs(log_format)
    if "://" not in ctx.obj:
        os.makedirs(store_folder(ctx), exist_ok=True)
    signals = {signal.SIGTERM, signal.SIGINT}
    former = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before threads are started: none of them takes them
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
