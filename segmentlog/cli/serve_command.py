"""``segmentlog serve``: serve the store over Kafka's protocol."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from segmentlog.cli.common import require_local_folder, say
from segmentlog.cli.option_types import DURATION_S, LIMITED_SIZE, SIZE
from segmentlog.cli.security_options import security_options
from segmentlog.speedups import CORE_NAME

if TYPE_CHECKING:
    from segmentlog.server.supervisor import StandbyPlan, Supervisor

_STATUS_S = 1.0
"""Seconds between updates of the status line."""


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
              help="Address for clients. Each further worker listens on a port of its own after this one.")  # fmt: skip
@click.option(
    "--advertise", metavar="HOST:PORT", help="Address that clients get to connect to, if it differs from --listen."
)
@click.option("--workers", type=_Workers(), default="auto", show_default=True, metavar="N|auto",
              help="Number of processes; auto: one per core. Each appears to clients as a broker.")  # fmt: skip
@click.option("--metrics", metavar="HOST:PORT",
              help="Serve Prometheus metrics, /healthz and /readyz; worker n uses the n-th port"
                   " from PORT.")  # fmt: skip
@click.option(
    "--http", "http_at", metavar="HOST:PORT", help="Serve the web console, REST and the schema registry (docs/http.md)."
)
@click.option("--allow-writes", is_flag=True, help="With --http: allow changes in the web console.")
@click.option("--allowed-host", "allowed_hosts", multiple=True, metavar="NAME",
              help="Additional Host header to accept for --metrics, and for --http without users.")  # fmt: skip
@security_options
@click.option("--auto-create/--no-auto-create", default=True, show_default=True,
              help="Create a topic that a client asks for.")  # fmt: skip
@click.option("--partitions", type=click.IntRange(1), default=1, show_default=True,
              help="Partitions of a topic that is created without a number.")  # fmt: skip
@click.option("--acks-all", type=click.Choice(["durable", "written", "shipped"]), default="durable", show_default=True,
              help="What acks=all waits for: fsync (durable), the write as in Kafka (written), or the upload"
                   " (shipped).")  # fmt: skip
@click.option("--durable-reads", is_flag=True, help="Return only records that no crash can lose.")
@click.option("--max-request", type=LIMITED_SIZE, default="100MiB", show_default=True, metavar="SIZE",
              help="The largest accepted request.")  # fmt: skip
@click.option(
    "--max-connections",
    type=click.IntRange(1),
    default=4096,
    show_default=True,
    help="Connection limit of each worker.",
)
@click.option("--cache", type=SIZE, default="1GiB", show_default=True, metavar="SIZE",
              help="Disk cache for records of local programs in Kafka's format; at most a quarter of the free"
                   " space.")  # fmt: skip
@click.option("--ship", metavar="URL", help="Also ship the store to an object store (docs/replicate.md).")
@click.option("--ship-interval", type=DURATION_S, default="1s", show_default=True, help="Time between uploads.")
@click.option("--standby", metavar="URL",
              help="Follow the store that another machine ships to URL, and take it over when that machine is gone."
                   " As its owner, ship it to URL (docs/standby.md).")  # fmt: skip
@click.option("--standby-silence", type=DURATION_S, default="8s", show_default=True,
              help="Take over if the owner has neither answered nor shipped for this long.")  # fmt: skip
@click.option("--standby-refused", type=DURATION_S, default="3s", show_default=True,
              help="Take over if the owner has refused connections for this long, and shipped nothing.")  # fmt: skip
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def serve(
    ctx: click.Context, listen: str, advertise: str | None, workers: int, metrics: str | None, http_at: str | None,
    allow_writes: bool, allowed_hosts: tuple[str, ...], tls_cert: str | None,
    tls_key: str | None, tls_client_ca: str | None, users: str | None, acls: str | None, insecure: bool,
    auto_create: bool, partitions: int, acks_all: Any, durable_reads: bool, max_request: int, max_connections: int,
    cache: int, ship: str | None, ship_interval: int, standby: str | None, standby_silence: int, standby_refused: int,
    log_format: str,
) -> None:  # fmt: skip
    """Serve the store to Kafka clients, which can produce to it and consume from it.

    Other processes can use the store at the same time: producers, consumers and groups of either kind see the same
    topics. SIGTERM finishes running requests first. A second SIGTERM stops at once, and loses no acknowledged record.
    """
    from segmentlog.security.listen_rules import parse_address
    from segmentlog.security.security_settings import Security
    from segmentlog.server.log_format import set_up_logs
    from segmentlog.server.server_settings import Limits, ServerSettings
    from segmentlog.server.supervisor import ServerPlan, Supervisor
    from segmentlog.server.worker_process import run

    if standby is not None and ship not in (None, standby):
        raise click.UsageError("--ship and --standby must name the same URL")
    set_up_logs(log_format)
    os.makedirs(require_local_folder(ctx), exist_ok=True)
    host, port = parse_address(listen)
    security = Security(
        tls_cert=tls_cert, tls_key=tls_key, tls_client_ca=tls_client_ca, users=users, acls=acls, insecure=insecure
    )
    beside = None
    if http_at is not None:
        from segmentlog.cli.http_sidecar import create_http_sidecar

        advertised = () if advertise is None else (parse_address(advertise, option="advertise")[0],)
        hosts = (*allowed_hosts, *advertised)
        beside = create_http_sidecar(http_at, security, allow_writes=allow_writes, allowed_hosts=hosts)
    elif allow_writes:
        raise click.UsageError("--allow-writes needs --http")
    plan = ServerPlan(
        path=ctx.obj,
        host=host,
        port=port,
        advertise=advertise,
        workers=workers,
        metrics=None if metrics is None else parse_address(metrics, option="metrics"),
        ship=ship,
        ship_interval_ms=ship_interval,
        standby=None if standby is None else _standby_plan(standby, standby_silence, standby_refused, ship_interval),
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
    status = _StatusLine(log_format)
    processes = None
    if plan.standby is not None:
        from segmentlog.server.standby_process import STANDBY  # before the fork: its processes start at once

        processes = STANDBY
    supervisor = Supervisor(plan, run, sidecar=beside, standby=processes, on_change=status.update)
    is_clean = False
    try:
        supervisor.run()
        is_clean = True
    finally:
        status.end(is_clean=is_clean)


def _standby_plan(url: str, silence_ms: int, refused_ms: int, interval_ms: int) -> StandbyPlan:
    from segmentlog.policy.takeover_decision import TakeoverSettings
    from segmentlog.server.supervisor import StandbyPlan

    settings = TakeoverSettings(silence_s=silence_ms / 1000, refused_s=refused_ms / 1000)
    return StandbyPlan(url=url, settings=settings, interval_ms=interval_ms)


class _StatusLine:
    """Prints the addresses once the server listens, and on a terminal a status line with connections and requests/s.

    The status line stays the last line: log lines of any process overwrite it (`server.log_format`), and it is drawn
    again below within a second. The supervisor draws it in its own loop, because a process with threads must not fork.
    """

    def __init__(self, log_format: str) -> None:
        self._is_json = log_format == "json"
        is_capable = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._has_status = is_capable and not self._is_json
        self._has_started = False
        self._start_message = ""
        self._is_shown = False
        self._requests = 0.0
        self._at_s = 0.0

    def update(self, supervisor: Supervisor) -> None:
        """Update the status after an event, or after a second without one."""
        message = _start_message(supervisor)
        if message and message != self._start_message:
            self._has_started, self._start_message = True, message
            self._say(message)
        if self._has_status and self._has_started:
            now_s = time.monotonic()
            if now_s - self._at_s >= _STATUS_S:
                self._show(supervisor, now_s)

    def end(self, *, is_clean: bool) -> None:
        """Remove the status line when the server has ended."""
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
        # A restarted worker counts from 0.
        rate = max(0.0, requests - self._requests) / (now_s - self._at_s) if self._at_s else 0.0
        self._requests, self._at_s, self._is_shown = requests, now_s, True
        connections = sum(word.get("connections", 0) for word in said)
        ready = supervisor.ready_count
        parts = [] if ready == len(said) else [f"{ready} of {len(said)} processes"]
        parts += [f"{connections:,} connection{'s' * (connections != 1)}", f"{rate:,.0f} requests/s"]
        _draw(", ".join(parts))


def _start_message(supervisor: Supervisor) -> str:
    """Return what the server does now: addresses and role. Empty as long as this is not known."""
    path, standby, role = supervisor.plan.path, supervisor.plan.standby, ""
    if standby is not None and not supervisor.is_standby:
        role = f" as the owner of the store at {standby.shown_url}"
    elif standby is not None:
        status, address = supervisor.standby_status, supervisor.bootstrap_servers
        if status.get("role") == "waiting":
            url = standby.shown_url
            return (
                f"{path}: waiting for a store at {url}; start the server of the first machine with --ship"
                f" {url} --standby {url}, or with --standby on its existing store ({address})"
            )
        if status.get("role") == "standby" and not status["is_complete"]:
            return f"{path}: standby of {status['owner']}; downloading the store first ({address})"
        if status.get("role") != "standby":
            return ""
        role = f" as a standby of {status['owner']}"
    if not supervisor.is_ready:
        return ""
    count = len(supervisor.nodes)
    some = f", {count} workers" if count > 1 else ""
    metrics = next((said["metrics"] for said in supervisor.statuses() if said.get("metrics")), None)
    told = f" (metrics: http://{metrics}/metrics)" if metrics else ""
    told += "".join(f" ({said['http']})" for said in supervisor.statuses() if "http" in said)
    return f"{path}: listening on {supervisor.bootstrap_servers}{some}{role}{told} ({CORE_NAME})"


def _draw(text: str) -> None:
    """Draw the last line of the terminal and leave the cursor at its start, so that the next line overwrites it."""
    with contextlib.suppress(OSError):
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        sys.stderr.write(f"\r\x1b[2K{text[: columns - 1]}\r")
        sys.stderr.flush()
