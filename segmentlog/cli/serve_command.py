"""``segmentlog serve``: Kafka's protocol over the store."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from segmentlog.cli.common import say, store_folder
from segmentlog.cli.option_types import DURATION_S, LIMITED_SIZE, SIZE
from segmentlog.cli.security_options import security_options
from segmentlog.speedups import CORE_NAME

if TYPE_CHECKING:
    from segmentlog.server.supervisor import Supervisor

_STATUS_S = 1.0
"""How often the status line is drawn."""


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
@click.option(
    "--http", "http_at", metavar="HOST:PORT", help="Pages for people, REST, the schema registry (docs/http.md)."
)
@click.option("--allow-writes", is_flag=True, help="Let people change something there, not only look.")
@click.option("--allowed-host", "allowed_hosts", multiple=True, metavar="NAME",
              help="A further name by which --metrics, and --http without users, may be asked for.")  # fmt: skip
@security_options
@click.option("--auto-create/--no-auto-create", default=True, show_default=True,
              help="Make a topic that somebody asks for.")  # fmt: skip
@click.option("--partitions", type=click.IntRange(1), default=1, show_default=True,
              help="Of a topic that is made without saying how many.")  # fmt: skip
@click.option("--acks-all", type=click.Choice(["durable", "written", "shipped"]), default="durable", show_default=True,
              help="What acks=all waits for: the disk; that it is written, as in Kafka; the object store.")  # fmt: skip
@click.option("--durable-reads", is_flag=True, help="Consumers see only what no crash can take back.")
@click.option("--max-request", type=LIMITED_SIZE, default="100MiB", show_default=True, metavar="SIZE",
              help="The largest request that is taken.")  # fmt: skip
@click.option("--max-connections", type=click.IntRange(1), default=4096, show_default=True, help="Of each worker.")
@click.option("--cache", type=SIZE, default="1GiB", show_default=True, metavar="SIZE",
              help="Disk for local programs' records in Kafka's format; up to a quarter of what is free.")  # fmt: skip
@click.option("--ship", metavar="URL", help="Ship the store to an object store meanwhile (docs/replicate.md).")
@click.option("--ship-interval", type=DURATION_S, default="1s", show_default=True, help="How often.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def serve(
    ctx: click.Context, listen: str, advertise: str | None, workers: int, metrics: str | None, http_at: str | None,
    allow_writes: bool, allowed_hosts: tuple[str, ...], tls_cert: str | None,
    tls_key: str | None, tls_client_ca: str | None, users: str | None, acls: str | None, insecure: bool,
    auto_create: bool, partitions: int, acks_all: Any, durable_reads: bool, max_request: int, max_connections: int,
    cache: int, ship: str | None, ship_interval: int, log_format: str,
) -> None:  # fmt: skip
    """Let Kafka's clients produce to the store, and consume from it.

    Other processes go on using the store meanwhile: producers, consumers and groups of either kind see the same
    topics. SIGTERM finishes what is in flight; a second one ends at once, and loses nothing that was acknowledged.
    """
    from segmentlog.security.listen_rules import parse_address
    from segmentlog.security.security_settings import Security
    from segmentlog.server.log_format import set_up_logs
    from segmentlog.server.server_settings import Limits, ServerSettings
    from segmentlog.server.supervisor import ServerPlan, Supervisor
    from segmentlog.server.worker_process import run

    set_up_logs(log_format)
    os.makedirs(store_folder(ctx), exist_ok=True)
    host, port = parse_address(listen)
    security = Security(
        tls_cert=tls_cert, tls_key=tls_key, tls_client_ca=tls_client_ca, users=users, acls=acls, insecure=insecure
    )
    beside = None
    if http_at is not None:
        from segmentlog.cli.http_sidecar import http_beside

        advertised = () if advertise is None else (parse_address(advertise, option="advertise")[0],)
        hosts = (*allowed_hosts, *advertised)
        beside = http_beside(http_at, security, allow_writes=allow_writes, allowed_hosts=hosts)
    elif allow_writes:
        raise click.UsageError("--allow-writes is about --http, which is not given")
    plan = ServerPlan(
        path=ctx.obj,
        host=host,
        port=port,
        advertise=advertise,
        workers=workers,
        metrics=None if metrics is None else parse_address(metrics, option="metrics"),
        ship=ship,
        ship_interval_ms=ship_interval,
        settings=ServerSettings(
            auto_create=auto_create,
            default_partitions=partitions,
            acks_all=acks_all,
            durable_reads=durable_reads,
            allowed_hosts=allowed_hosts,
            limits=Limits(request_bytes=max_request, connections=max_connections, rendered_bytes=cache),
        ),
        security=security,
    )
    told = _Told(log_format)
    supervisor = Supervisor(plan, run, sidecar=beside, on_change=told.tell)
    is_clean = False
    try:
        supervisor.run()
        is_clean = True
    finally:
        told.end(is_clean=is_clean)


class _Told:
    """What people see: one line that says where it listens, and on a terminal one that says what goes on.

    The latter stays the last one: whatever is logged, by any of the processes, takes its place
    (`server.log_format`), and it is drawn again below within a second. No thread draws it, since the supervisor forks.
    """

    def __init__(self, log_format: str) -> None:
        self._is_json = log_format == "json"
        is_capable = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._has_status = is_capable and not self._is_json
        self._has_told = False
        self._is_shown = False
        self._requests = 0.0
        self._at_s = 0.0

    def tell(self, supervisor: Supervisor) -> None:
        """Something happened, or nothing for a second."""
        if not self._has_told and supervisor.is_ready:
            self._has_told = True
            self._say(_beginning(supervisor))
        if self._has_status and self._has_told:
            now_s = time.monotonic()
            if now_s - self._at_s >= _STATUS_S:
                self._show(supervisor, now_s)

    def end(self, *, is_clean: bool) -> None:
        """The server has ended."""
        if self._is_shown:
            _draw("")
        if is_clean:
            self._say("stopped")

    def _say(self, text: str) -> None:
        if self._is_json:
            logging.getLogger("segmentlog.server").info("%s", text)
        else:
            say(text)

    def _show(self, supervisor: Supervisor, now_s: float) -> None:
        said = supervisor.statuses()
        requests = sum(word.get("requests", 0) for word in said)
        # A worker that was started again counts anew.
        rate = max(0.0, requests - self._requests) / (now_s - self._at_s) if self._at_s else 0.0
        self._requests, self._at_s, self._is_shown = requests, now_s, True
        connections = sum(word.get("connections", 0) for word in said)
        ready = supervisor.ready_count
        parts = [] if ready == len(said) else [f"{ready} of {len(said)} processes"]
        parts += [f"{connections:,} connection{'s' * (connections != 1)}", f"{rate:,.0f} requests/s"]
        _draw(", ".join(parts))


def _beginning(supervisor: Supervisor) -> str:
    count = len(supervisor.nodes)
    some = f", {count} workers" if count > 1 else ""
    metrics = supervisor.statuses()[0].get("metrics")
    told = f" (metrics: http://{metrics}/metrics)" if metrics else ""
    told += "".join(f" ({said['http']})" for said in supervisor.statuses() if "http" in said)
    return f"{supervisor.plan.path}: listening on {supervisor.bootstrap_servers}{some}{told} ({CORE_NAME})"


def _draw(text: str) -> None:
    """The last line of the terminal, and the cursor at its beginning, where the next line goes over it."""
    with contextlib.suppress(OSError):
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        sys.stderr.write(f"\r\x1b[2K{text[: columns - 1]}\r")
        sys.stderr.flush()
