"""``segmentlog serve``: Kafka's protocol over the store."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from segmentlog.cli.common import say
from segmentlog.cli.options import SIZE

if TYPE_CHECKING:
    from segmentlog.server.supervisor import Supervisor

_FILE = click.Path(exists=True, dir_okay=False, readable=True)


class _Workers(click.ParamType[Any] if TYPE_CHECKING else click.ParamType):  # type: ignore[misc]
    name = "workers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value == "auto":
            return len(os.sched_getaffinity(0))
        if str(value).isdecimal() and 1 <= int(value) <= 64:
            return int(value)
        self.fail(f"{value!r} is neither auto nor a number from 1 to 64", param, ctx)
        raise AssertionError  # `fail` does not return


@click.command()
@click.option("--listen", default="127.0.0.1:9092", show_default=True, metavar="HOST:PORT",
              help="Where clients come first. With several workers each has another port behind it.")  # fmt: skip
@click.option("--advertise", metavar="HOST:PORT", help="What clients are told instead, where they reach it otherwise.")
@click.option("--workers", type=_Workers(), default="auto", show_default=True, metavar="N|auto",
              help="Processes; auto is one a core. To a client each is a broker.")  # fmt: skip
@click.option("--metrics", metavar="HOST:PORT",
              help="Prometheus, /healthz and /readyz; worker n on the n-th port from there.")  # fmt: skip
@click.option("--tls-cert", type=_FILE, metavar="FILE", help="Certificate, PEM: encrypt.")
@click.option("--tls-key", type=_FILE, metavar="FILE", help="Its private key, PEM.")
@click.option("--tls-client-ca", type=_FILE, metavar="FILE", help="Take only clients with a certificate of these.")
@click.option("--users", type=_FILE, metavar="FILE", help="Take only these users (see `segmentlog users`).")
@click.option("--acls", type=_FILE, metavar="FILE", help="What they may do; whatever it does not allow is denied.")
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without TLS or users.")
@click.option("--auto-create/--no-auto-create", default=True, show_default=True,
              help="Make a topic that somebody asks for.")  # fmt: skip
@click.option("--partitions", type=click.IntRange(1), default=1, show_default=True,
              help="Of a topic that is made without saying how many.")  # fmt: skip
@click.option("--acks-all", type=click.Choice(["durable", "written"]), default="durable", show_default=True,
              help="What acks=all waits for: the disk, or, as in Kafka, that it is written.")  # fmt: skip
@click.option("--durable-reads", is_flag=True, help="Consumers see only what no crash can take back.")
@click.option("--max-request", type=SIZE, default="100MiB", show_default=True, metavar="SIZE",
              help="The largest request that is taken.")  # fmt: skip
@click.option("--max-connections", type=click.IntRange(1), default=4096, show_default=True, help="Of each worker.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def serve(
    ctx: click.Context, listen: str, advertise: str | None, workers: int, metrics: str | None, tls_cert: str | None,
    tls_key: str | None, tls_client_ca: str | None, users: str | None, acls: str | None, insecure: bool,
    auto_create: bool, partitions: int, acks_all: Any, durable_reads: bool, max_request: int, max_connections: int,
    log_format: str,
) -> None:  # fmt: skip
    """Let Kafka's clients produce to the store, and consume from it.

    Other processes go on using the store meanwhile: producers, consumers and groups of either kind see the same
    topics. SIGTERM finishes what is in flight; a second one ends at once, and loses nothing that was acknowledged.
    """
    from segmentlog.server.addresses import parse_address
    from segmentlog.server.logs import set_up_logs
    from segmentlog.server.settings import Limits, Security, ServerSettings
    from segmentlog.server.supervisor import Plan, Supervisor
    from segmentlog.server.worker_process import run

    set_up_logs(log_format)
    os.makedirs(ctx.obj, exist_ok=True)
    host, port = parse_address(listen)
    plan = Plan(
        path=ctx.obj,
        host=host,
        port=port,
        advertise=advertise,
        workers=workers,
        metrics=None if metrics is None else parse_address(metrics, option="metrics"),
        settings=ServerSettings(
            auto_create=auto_create,
            default_partitions=partitions,
            acks_all=acks_all,
            durable_reads=durable_reads,
            limits=Limits(request_bytes=max_request, connections=max_connections),
        ),
        security=Security(
            tls_cert=tls_cert, tls_key=tls_key, tls_client_ca=tls_client_ca, users=users, acls=acls, insecure=insecure
        ),
    )
    told = _Told()
    supervisor = Supervisor(plan, run, on_change=told.tell)
    try:
        supervisor.run()
    finally:
        told.end()
    say("stopped")


class _Told:
    """What people see: one line that says where it listens, and on a terminal what goes on."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._has_told = False
        self._status: Any = None
        self._requests = 0.0
        self._at_s = 0.0

    def tell(self, supervisor: Supervisor) -> None:
        if not self._has_told and supervisor.is_ready:
            self._has_told = True
            count = len(supervisor.nodes)
            some = f", {count} workers" if count > 1 else ""
            say(f"{supervisor.plan.path}: listening on {supervisor.bootstrap_servers}{some}")
        if self._is_terminal and self._has_told:
            self._show(supervisor)

    def _show(self, supervisor: Supervisor) -> None:
        import time

        from rich.console import Console

        if self._status is None:
            self._status = Console(stderr=True).status("", spinner="dots")
            self._status.start()
        said = supervisor.said()
        requests, now_s = sum(word.get("requests", 0) for word in said), time.monotonic()
        rate = max(0.0, requests - self._requests) / (now_s - self._at_s) if self._at_s else 0.0
        self._requests, self._at_s = requests, now_s
        connections = sum(word.get("connections", 0) for word in said)
        self._status.update(f"{connections} connections, {rate:,.0f} requests/s")

    def end(self) -> None:
        if self._status is not None:
            self._status.stop()
