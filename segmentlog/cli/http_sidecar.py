"""Run the HTTP server of ``segmentlog serve --http`` in a separate process under the Kafka server's supervisor."""

from __future__ import annotations

import socket

import click

import segmentlog
from segmentlog.http.settings import HttpSettings
from segmentlog.security.listen_rules import parse_address, start_listening
from segmentlog.security.security_settings import Security
from segmentlog.server.supervisor import ServerPlan, SidecarProcess


def create_http_sidecar(
    address: str, security: Security, *, allow_writes: bool, allowed_hosts: tuple[str, ...]
) -> SidecarProcess:
    """Return the process that serves HTTP at ``address``; `Supervisor` starts it.

    Raises `InvalidConfig`, `UnsafeListening`, and ClickException if the extra ``[http]`` is not installed.
    """
    host, port = parse_address(address, option="http")
    try:
        # Import before the fork: the process then starts at once.
        from segmentlog.http.serving import HttpServer, check_http_security
    except ImportError as error:
        raise click.ClickException(
            f"--http needs the extra 'http': run pip install '.[http]' in a clone of segmentlog ({error})"
        ) from None
    from segmentlog.server.worker_lifecycle import send_heartbeats, stop_with_supervisor

    check_http_security(host, security)
    settings = HttpSettings(allow_writes=allow_writes, allowed_hosts=allowed_hosts)

    def run(plan: ServerPlan, sock: socket.socket, status_fd: int, alive_fd: int) -> None:
        stop = stop_with_supervisor(alive_fd)
        is_standby = plan.is_standby
        if is_standby:
            from segmentlog.server.standby_process import wait_for_replica

            if not wait_for_replica(plan.path, stop, status_fd):
                return
            start_listening(sock)
        with (
            segmentlog.open(plan.path, create=not is_standby, read_only=is_standby, background=not is_standby) as store,
            HttpServer(store, host, port, settings=settings, security=plan.security, sock=sock) as server,
        ):
            send_heartbeats(stop, status_fd, lambda: server.is_alive, lambda: {"http": server.url})

    return SidecarProcess("http", host, port, run)
