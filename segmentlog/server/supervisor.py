"""Run a Kafka server as a supervisor process and its workers.

    supervisor    binds every port, holds the store's server lock and forks the workers. It has no threads and does not
                  open the store. It imports the workers' modules in advance, so that a worker starts at once
    worker        a process with the store open. It serves the first port together with the other workers, and one port
                  of its own
    standby       with --standby, while another machine owns the store: a process that follows the store and takes it
                  over (`standby_process`). The workers then send clients to the owner. When the role of the machine
                  changes, the supervisor ends all processes and starts those of the new role, on the same ports.
                  The ports refuse connections until the machine knows its role, and a standby has a complete replica:
                  clients then try their other bootstrap addresses at once

The supervisor restarts a worker that dies. Its clients reconnect, and the records that it acknowledged are in the log.
If a worker sends no heartbeat for `SILENT_S`, the supervisor kills it and then starts another: two processes must never
have the same worker number. Workers also end when the supervisor ends, even by SIGKILL. They read from a pipe to
which no process writes. The kernel closes its write end when the supervisor ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, NoReturn

import msgspec

from segmentlog.clock import Clock
from segmentlog.defaults import SHIP_INTERVAL_MS
from segmentlog.errors import SegmentlogError
from segmentlog.objects.bucket.error_messages import without_secrets
from segmentlog.policy.takeover_decision import TakeoverSettings
from segmentlog.security.listen_rules import (
    bind_again,
    check_safe,
    check_safe_to_report,
    check_tls_files,
    listen,
    parse_address,
    start_listening,
)
from segmentlog.security.security_settings import Security
from segmentlog.server.addresses import ServerLock, warn_uncovered_names, worker_nodes
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.worker_cluster import WorkerNode
from segmentlog.storage.file_operations import make_folders_durably
from segmentlog.storage.fs import FileSystem
from segmentlog.topics.store_file import open_store_file

logger = logging.getLogger("segmentlog.server")

HEARTBEAT_S: Final = 1.0
"""Interval of a worker's heartbeats."""
SILENT_S: Final = 30.0
"""A worker without a heartbeat for this long is killed. Generous: the machine may be busy and the disk slow."""
FINISH_S: Final = 5.0
"""Time that a stopping worker gives requests in progress."""
_PATIENCE_S: Final = FINISH_S + 5.0
_STANDBY: Final = 0
"""Number of the process that follows the owner; workers have numbers from 1."""
_OWNER: Final = "owner"
_FOLLOWS: Final = frozenset(("waiting", "standby", "taking over"))
"""Roles of a machine that is not the owner."""
_SOON_S: Final = 1.0
"""A worker that dies earlier than this after its start is restarted with a growing delay."""
_PAUSE_MAX_S: Final = 5.0


class StandbyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a machine that takes over the store shipped to ``url`` when its owner is gone."""

    url: str
    settings: TakeoverSettings = TakeoverSettings()
    interval_ms: int = SHIP_INTERVAL_MS
    """Time between refreshes of the replica, and between probes of the owner."""

    @property
    def shown_url(self) -> str:
        """The URL without passwords and tokens, for messages."""
        return without_secrets(self.url)


class ServerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a server: store, addresses, number of workers, metrics endpoint, shipping, limits and security."""

    path: str
    host: str
    port: int
    advertise: str | None = None
    workers: int = 1
    metrics: tuple[str, int] | None = None
    ship: str | None = None
    """Object store to which one worker ships the store every ``ship_interval_ms``. With ``standby``: create the store
    in an empty folder if none is shipped yet."""
    ship_interval_ms: int = SHIP_INTERVAL_MS
    standby: StandbyPlan | None = None
    """With this, the machine ships the store only while it is the owner, and follows the owner otherwise."""
    is_standby: bool = False
    """Whether another machine owns the store, or the role is not known yet. The supervisor sets it for each process."""
    settings: ServerSettings = ServerSettings()
    security: Security = Security()


class SidecarProcess(NamedTuple):
    """A process next to the workers that serves another protocol on a port of its own, such as HTTP."""

    name: str
    host: str
    port: int
    run: Callable[[ServerPlan, socket.socket, int, int], None]
    """Function that the process runs. Arguments: plan, socket, status pipe to the supervisor, and the pipe that ends
    with the supervisor."""


class WorkerFailed(SegmentlogError):
    """A worker could not start; the message is the worker's reason."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return self.why


class _ChildProcess:
    """The supervisor's state of one child process: a worker or the sidecar."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.pid = 0
        self.status_fd = -1
        self.is_ready = False
        self.started_s = self.last_status_s = 0.0
        self.pause_s = 0.0
        self.start_at_s = 0.0
        self.status: dict[str, Any] = {}
        self.unread = b""
        self.has_hung_up = False


WorkerMain = Callable[[ServerPlan, "list[socket.socket]", "list[WorkerNode]", int, int, int], None]
"""Main function of a worker process. Arguments: plan, its sockets, all workers, its number, the status pipe to the
supervisor, and the pipe that ends with the supervisor."""


class StandbyProcesses(NamedTuple):
    """Main functions of the processes of a standby (`standby_process`)."""

    follow: Callable[[ServerPlan, list[WorkerNode], int, int], None]
    """Follows the owner. Arguments: plan, the workers of this machine, the status pipe to the supervisor, and the pipe
    that ends with the supervisor."""
    work: WorkerMain


class Supervisor:
    """Starts and watches the workers of a server until a stop signal. Call `run` in the main thread of its process."""

    def __init__(
        self,
        plan: ServerPlan,
        child: WorkerMain,
        *,
        sidecar: SidecarProcess | None = None,
        standby: StandbyProcesses | None = None,
        on_change: Callable[[Supervisor], None] | None = None,
    ) -> None:
        security = plan.security.completed_from_store(plan.path)
        plan = msgspec.structs.replace(plan, security=security)
        check_tls_files(security.tls_cert, security.tls_key, security.tls_client_ca)
        check_safe(plan.host, security.tls_cert is not None, security.users is not None, security.insecure)
        if plan.metrics is not None:
            check_safe_to_report(plan.metrics[0], security.insecure)
        advertised = None if plan.advertise is None else parse_address(plan.advertise, option="advertise")
        self.plan = plan
        self._worker_main = child
        self._sidecar = sidecar
        self._standby = standby
        self._on_change = on_change
        self._sockets: list[socket.socket] = []
        self._sidecar_socket: socket.socket | None = None
        self.is_standby = plan.standby is not None
        """Whether the machine is not the owner, or its role is not known yet."""
        if plan.standby is None:
            # Create the store before the lock file makes its folder non-empty.
            open_store_file(FileSystem(), plan.path, True, Clock().now_ms())
        else:
            # The folder may be anything until the role is known: the process that finds it out creates the store.
            make_folders_durably(FileSystem(), plan.path)
        self._lock = ServerLock(plan.path)
        try:
            self._sockets.append(listen(plan.host, plan.port))
            if plan.workers > 1:
                for number in range(1, plan.workers + 1):
                    self._sockets.append(listen(plan.host, plan.port + number if plan.port else 0))
            self.nodes, self.bootstrap_servers = worker_nodes(
                plan.host, self._sockets, advertised, is_one_of_several=plan.standby is not None
            )
            warn_uncovered_names(security.tls_cert, self.nodes)
            self._lock.write_addresses(self.bootstrap_servers, self.nodes)
            if sidecar is not None:
                self._sidecar_socket = listen(sidecar.host, sidecar.port)
            if self.is_standby:
                self._stop_listening()
        except BaseException:
            self._close()
            raise
        self._children = self._new_children()
        self._alive_read, self._alive_write = os.pipe2(os.O_CLOEXEC)
        self._stops = 0
        self.was_ready = False

    def _new_children(self) -> list[_ChildProcess]:
        """Return the processes of the current role, not started."""
        children = [_ChildProcess(_STANDBY, "standby")] if self.is_standby else []
        children += [_ChildProcess(number, f"worker {number}") for number in range(1, self.plan.workers + 1)]
        if self._sidecar is not None:
            children.append(_ChildProcess(self.plan.workers + 1, self._sidecar.name))
        return children

    def statuses(self) -> list[dict[str, Any]]:
        """Return the last status of each child process."""
        return [child.status for child in self._children]

    @property
    def ready_count(self) -> int:
        """Number of child processes that serve."""
        return sum(child.is_ready for child in self._children)

    @property
    def is_ready(self) -> bool:
        """Whether every child process serves."""
        return all(child.is_ready for child in self._children)

    @property
    def standby_status(self) -> dict[str, Any]:
        """Last status of the process that follows the owner: role, owner, whether the replica is complete.

        Empty in the role of the owner, and before the process knows the role.
        """
        return next((child.status for child in self._children if child.number == _STANDBY), {})

    # ------------------------------------------------------------ running

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raise `WorkerFailed` if a worker cannot start when the server starts."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
        former_fd = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        try:
            signal.signal(signal.SIGTERM, self._stop)
            signal.signal(signal.SIGINT, self._stop)
            signal.signal(signal.SIGCHLD, lambda number, frame: None)
            for child in self._children:
                self._start(child)
            while not self._stops:
                self._wait(wake_read, self._next_check_s())
                self._check_children()
                if not self._stops and self._has_new_role():
                    self._change_role(wake_read)
            self._finish(wake_read)
        finally:
            signal.set_wakeup_fd(former_fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._end_at_once()
            self._close()
            os.close(wake_read)
            os.close(wake_write)

    def _has_new_role(self) -> bool:
        if self.is_standby:
            return self.standby_status.get("role") == _OWNER
        return any(child.status.get("new_owner") for child in self._children)

    def _change_role(self, wake_read: int) -> None:
        """End all processes, and start those of the other role."""
        assert self.plan.standby is not None
        if self.is_standby:
            logger.info("%s: this machine is the owner of the store at %s", self.plan.path, self.plan.standby.shown_url)
        else:
            owner = next(child.status["new_owner"] for child in self._children if child.status.get("new_owner"))
            logger.warning("%s: %s has taken over the store; this machine is a standby now", self.plan.path, owner)
        self._finish(wake_read)
        self._end_at_once()
        self.is_standby = not self.is_standby
        if self.is_standby:
            self._stop_listening()
        else:
            # Before the workers start: clients that connect now wait for them.
            for sock in self._all_sockets:
                start_listening(sock)
        self._children = self._new_children()
        if not self._stops:
            for child in self._children:
                self._start(child)

    def _stop_listening(self) -> None:
        """Keep the ports, but refuse connections. No child process may have the sockets."""
        for index, sock in enumerate(self._sockets):
            self._sockets[index] = bind_again(sock)
        if self._sidecar_socket is not None:
            self._sidecar_socket = bind_again(self._sidecar_socket)

    @property
    def _all_sockets(self) -> list[socket.socket]:
        return [*self._sockets, *([] if self._sidecar_socket is None else [self._sidecar_socket])]

    def _stop(self, number: int, frame: object) -> None:
        self._stops += 1
        if self._stops > 1:
            self._end_at_once()

    def _wait(self, wake_read: int, timeout_s: float) -> None:
        """Sleep until a signal or a worker's status arrives, or for ``timeout_s``."""
        poll = select.poll()
        poll.register(wake_read, select.POLLIN)
        for child in self._children:
            # Skip a pipe whose worker closed it: each poll would return at once. A killed process closes its files some
            # time before it ends and SIGCHLD arrives.
            if child.status_fd >= 0 and not child.has_hung_up:
                poll.register(child.status_fd, select.POLLIN)
        for fd, _ in poll.poll(max(timeout_s, 0) * 1000):
            if fd == wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
        for child in self._children:
            self._read_status(child)

    def _next_check_s(self) -> float:
        now_s = time.monotonic()
        waiting = [child.start_at_s - now_s for child in self._children if not child.pid]
        return min([HEARTBEAT_S, *waiting])

    def _check_children(self) -> None:
        """Start workers that died, and kill workers that are silent."""
        now_s = time.monotonic()
        for child in self._children:
            if child.pid and now_s - child.last_status_s > SILENT_S:
                _log(logging.ERROR, child, f"sent no heartbeat for {SILENT_S:.0f} s and is killed")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
            if child.pid and (how := _how_ended(child.pid)) is not None:
                self._handle_end(child, now_s, how)
            if not child.pid and not self._stops and now_s >= child.start_at_s:
                self._start(child)
        if self._on_change is not None:
            self._on_change(self)

    def _handle_end(self, child: _ChildProcess, now_s: float, how: str) -> None:
        self._read_status(child)
        os.close(child.status_fd)
        if not self._stops:
            why = f": {child.status['failed']}" if "failed" in child.status else ""
            _log(logging.ERROR, child, f"{how}{why}")
        child.pid, child.status_fd, child.is_ready = 0, -1, False
        if "failed" in child.status and not self.was_ready:
            raise WorkerFailed(str(child.status["failed"]))
        if now_s - child.started_s < _SOON_S:
            child.pause_s = min(max(2 * child.pause_s, 0.1), _PAUSE_MAX_S)
        else:
            child.pause_s = 0.0
        child.start_at_s = now_s + child.pause_s

    def _read_status(self, child: _ChildProcess) -> None:
        """Read the status lines that a worker has sent since the last call."""
        if child.status_fd < 0:
            return
        with contextlib.suppress(BlockingIOError):
            while data := os.read(child.status_fd, 1 << 16):
                child.last_status_s = time.monotonic()
                *lines, child.unread = (child.unread + data).split(b"\n")
                for line in lines:
                    child.status = json.loads(line)
                    child.is_ready |= bool(child.status.get("ready"))
            child.has_hung_up = True
        is_standby_known = self.standby_status.get("role") in _FOLLOWS
        if not self.was_ready and (is_standby_known if self.is_standby else self.is_ready):
            self.was_ready = True
            if self._on_change is not None:
                self._on_change(self)

    def _start(self, child: _ChildProcess) -> None:
        status_read, status_write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(status_read, False)
        # Block SIGTERM until the worker has a handler: a stop signal that arrives earlier must reach it, too.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
        try:
            pid = os.fork()
            if not pid:
                os.close(status_read)
                self._run_child(child.number, status_write)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
        os.close(status_write)
        child.pid, child.status_fd, child.unread, child.status, child.has_hung_up = pid, status_read, b"", {}, False
        child.started_s = child.last_status_s = time.monotonic()
        if self.was_ready:  # `serve` reports the first start of all workers together
            _log(logging.INFO, child, "was started")

    def _run_child(self, number: int, status_fd: int) -> NoReturn:
        """Run the worker in the forked child; never return."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until the worker has a handler of its own
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
            # Metrics report how far the store is shipped. Programs expect the addresses in the first line of the log.
            logging.getLogger("segmentlog.ship").setLevel(logging.WARNING)
            if number > 1:  # every process reads the files of users and ACLs; only the first one logs that they changed
                logging.getLogger("segmentlog.server.reloads").setLevel(logging.ERROR)
            os.close(self._alive_write)
            for child in self._children:
                if child.status_fd >= 0:
                    os.close(child.status_fd)
            if number == _STANDBY:
                self._run_standby(status_fd)
            elif number > self.plan.workers:
                self._run_sidecar(status_fd)
            else:
                sockets = [self._sockets[0]]
                for index, sock in enumerate(self._sockets[1:], 1):
                    if index == number:
                        sockets.append(sock)
                    else:
                        sock.close()
                if self._sidecar_socket is not None:
                    self._sidecar_socket.close()
                self._run_worker(sockets, number, status_fd)
            code = 0
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(status_fd, json.dumps({"failed": f"{error}" or type(error).__name__}).encode() + b"\n")
        finally:
            os._exit(code)  # do not unwind the supervisor's frames in the worker

    def _plan_of_role(self) -> ServerPlan:
        if self.plan.standby is None:
            return self.plan
        ship = None if self.is_standby else self.plan.standby.url
        return msgspec.structs.replace(self.plan, ship=ship, is_standby=self.is_standby)

    def _run_worker(self, sockets: list[socket.socket], number: int, status_fd: int) -> None:
        plan = self._plan_of_role()
        work = self._worker_main
        if self.is_standby:
            assert self._standby is not None
            work = self._standby.work
        work(plan, sockets, self.nodes, number, status_fd, self._alive_read)

    def _run_standby(self, status_fd: int) -> None:
        assert self._standby is not None
        for sock in self._all_sockets:
            sock.close()
        self._standby.follow(self.plan, self.nodes, status_fd, self._alive_read)

    def _run_sidecar(self, status_fd: int) -> None:
        assert self._sidecar is not None
        assert self._sidecar_socket is not None
        for sock in self._sockets:
            sock.close()
        self._sidecar.run(self._plan_of_role(), self._sidecar_socket, status_fd, self._alive_read)

    # ------------------------------------------------------------ ending

    def _finish(self, wake_read: int) -> None:
        """Send SIGTERM to the workers, and wait until they have finished the requests in progress."""
        for child in self._children:
            if child.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGTERM)
        ends_s = time.monotonic() + _PATIENCE_S
        while any(child.pid for child in self._children) and time.monotonic() < ends_s and self._stops < 2:
            self._wait(wake_read, 0.1)
            for child in self._children:
                if child.pid and _how_ended(child.pid) is not None:
                    os.close(child.status_fd)
                    child.pid, child.status_fd = 0, -1

    def _end_at_once(self) -> None:
        for child in self._children:
            if child.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, 0)
                child.pid = 0

    def _close(self) -> None:
        for sock in self._all_sockets:
            sock.close()
        self._lock.release()


def _log(level: int, child: _ChildProcess, message: str) -> None:
    logger.log(level, "%s (process %d) %s", child.name, child.pid, message, extra={"worker": child.number})


def _how_ended(pid: int) -> str | None:
    """Return how a process has ended, as text for the log; None while it runs."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return "ended"
    if ended != pid:
        return None
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
