"""Servers of etcd and ZooKeeper that are killed or stopped, and connections that lose requests and answers."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
from coordination.engine_servers import EngineServer, ask_etcd, etcd
from coordination.engines import SERVERS, engine_url
from coordination.losing_proxy import Loss, losing_proxy
from coordination.test_cluster_coordinator import FIRST, created
from waiting import PATIENCE_S, wait_until

from segmentlog.coordination import etcd_gateway, zookeeper_engine
from segmentlog.coordination.cluster_coordinator import Coordinator, SwapOutcome, SwapResult, VersionedDocument
from segmentlog.coordination.open_engine import open_coordinator
from segmentlog.errors import CoordinatorRefused, CoordinatorUnreachable


@contextlib.contextmanager
def paused(*servers: EngineServer) -> Iterator[None]:
    """Stop servers for the duration of the context, in which requests wait only half a second for an answer."""
    limits = (mock.patch.object(module, "REQUEST_S", 0.5) for module in (etcd_gateway, zookeeper_engine))
    with contextlib.ExitStack() as stack:
        for server in servers:
            server.pause()
            stack.callback(server.resume)
        for limit in limits:
            stack.enter_context(limit)
        yield


@pytest.fixture(params=SERVERS)
def kind(request: pytest.FixtureRequest) -> str:
    """Return the name of an engine that is a server."""
    return str(request.param)


@pytest.fixture
def server(kind: str, tmp_path: Path) -> Iterator[EngineServer]:
    """Provide a server of this kind, for one test."""
    with SERVERS[kind](tmp_path) as servers:
        yield servers[0]


@pytest.mark.parametrize("is_first", [True, False])
def test_lost_requests_and_answers(kind: str, server: EngineServer, is_first: bool) -> None:
    """The nonce shows that a swap without an answer succeeded. A lost request stays unknown: it may still arrive."""
    with (
        losing_proxy(kind, server.port) as proxy,
        contextlib.closing(open_coordinator(engine_url(kind, proxy.port))) as coordinator,
    ):
        coordinator._engine.compare_and_swap("other", b"", None)  # ZooKeeper has a node for the path from now on
        before = None if is_first else created(coordinator)
        version = before.version if before else None
        proxy.losses.append(Loss.REQUEST)
        lost = coordinator.swap(FIRST, version)
        assert (lost.outcome, lost.current) == (SwapOutcome.UNKNOWN, before)
        assert type(lost.error) is CoordinatorUnreachable
        assert "the connection was closed" in str(lost.error)
        proxy.losses.append(Loss.ANSWER)
        swapped = coordinator.swap(FIRST, version)
        assert (swapped.outcome, swapped.error) == (SwapOutcome.SUCCEEDED, None)
        assert swapped.current == coordinator.read()
        assert coordinator.resolve(lost.sent, version).outcome is SwapOutcome.LOST
        assert proxy.losses == []


def test_a_stopped_server_gives_no_answer(kind: str, server: EngineServer) -> None:
    """A swap is unknown until the server continues; then `resolve` shows the outcome."""
    with contextlib.closing(open_coordinator(engine_url(kind, server.port))) as coordinator:
        first = created(coordinator)
        with paused(server):
            stopped = coordinator.swap(FIRST, first.version)
            assert (stopped.outcome, stopped.current) == (SwapOutcome.UNKNOWN, None)
            assert type(stopped.error) is CoordinatorUnreachable
            with pytest.raises(CoordinatorUnreachable, match=r"no answer in time|no server can be reached"):
                coordinator.wait(first.version, 0)
        later = settled_swap(coordinator, first)
        found = wait_until(lambda: resolved(coordinator, stopped, first))
        assert found.current == later.current
        assert (found.outcome is SwapOutcome.SUCCEEDED) == (found.current.document == stopped.sent)


def test_closing_ends_waits(kind: str, server: EngineServer) -> None:
    """A process that closes does not wait for the time to pass."""
    coordinator = open_coordinator(engine_url(kind, server.port))
    first = created(coordinator)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(coordinator.wait, first.version, 3600) for _ in range(2)]
        time.sleep(0.1)  # most likely they wait by then; if not, they end all the same
        coordinator.close()
        assert [one.result() for one in waiting] == [None, None]
    coordinator.close()
    assert coordinator.wait(first.version, 3600) is None


def settled_swap(coordinator: Coordinator, before: VersionedDocument) -> SwapResult:
    """Swap until the outcome is not unknown: right after an outage a request can still fail."""

    def swap() -> SwapResult | None:
        result = coordinator.swap(FIRST, before.version)
        return None if result.outcome is SwapOutcome.UNKNOWN else result

    return wait_until(swap)


def test_a_forked_child_continues(kind: str, server: EngineServer) -> None:
    """It has connections of its own, and none of the parent's, which continues as well."""
    with contextlib.closing(open_coordinator(engine_url(kind, server.port))) as coordinator:
        first = created(coordinator)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(coordinator.wait, first.version, 3600)
            if kind == "etcd":
                wait_until(lambda: coordinator._engine._gateway._watching)
            watches = wait_until(lambda: connections(server.port))
            with contextlib.ExitStack() as stack:
                read_fd, write_fd = os.pipe()
                stack.callback(os.close, read_fd)
                child = os.fork()
                if not child:
                    swap_in_child(coordinator, first, watches, write_fd)
                os.close(write_fd)
                assert os.read(read_fd, 1000) == b"done"
                os.waitpid(child, 0)
            second = waiting.result(PATIENCE_S)
        assert second == coordinator.read()
        assert second is not None
        assert second.version.number == 2


def swap_in_child(coordinator: Coordinator, first: VersionedDocument, watches: set[int], write_fd: int) -> NoReturn:
    """Swap the document, report the result, and end the process."""
    try:
        left = [fd for fd in watches if os.path.exists(f"/proc/self/fd/{fd}")]
        swapped = coordinator.swap(FIRST, first.version)
        is_done = swapped.outcome is SwapOutcome.SUCCEEDED and coordinator.read() == swapped.current and not left
        os.write(write_fd, b"done" if is_done else f"{left} {swapped}".encode())
        coordinator.close()
    except BaseException as error:
        os.write(write_fd, repr(error).encode())
    finally:
        os._exit(0)


def connections(port: int) -> set[int]:
    """Return the descriptors of this process's connections to a port."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.family == socket.AF_INET and copy.getpeername()[1] == port:
                        found.add(int(name))
    return found


# ---------------------------------------------------------------- swaps while servers die

SWAPPERS = 3


class Swappers:
    """Threads that swap a document over and over, each with a coordinator of its own."""

    def __init__(self, url: str) -> None:
        self.results: list[SwapResult] = []
        self._url = url
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(SWAPPERS)

    def __enter__(self) -> Swappers:
        with contextlib.closing(open_coordinator(self._url)) as coordinator:
            self.results.append(coordinator.swap(FIRST, None))
        self._running = [self._pool.submit(self._swap) for _ in range(SWAPPERS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for one in self._running:
            one.result()

    def _swap(self) -> None:
        with contextlib.closing(open_coordinator(self._url)) as coordinator:
            while not self._stop.is_set():
                with contextlib.suppress(CoordinatorUnreachable):
                    current = coordinator.read()
                    assert current is not None
                    self.results.append(coordinator.swap(FIRST, current.version))

    def wait_for_successes(self, more: int) -> None:
        """Wait until a number of further swaps have succeeded."""
        wanted = self._successes() + more
        wait_until(lambda: self._successes() >= wanted or any(one.done() for one in self._running))

    def _successes(self) -> int:
        return sum(result.outcome is SwapOutcome.SUCCEEDED for result in self.results)

    def check(self) -> None:
        """Check that each version has one document, and that outcomes agree with what was read."""
        nonces: dict[int, set[str]] = {}
        for result in self.results:
            if result.outcome is SwapOutcome.SUCCEEDED:
                nonces.setdefault(result.sent.version, set()).add(result.sent.nonce)
            if result.current is not None:
                nonces.setdefault(result.current.document.version, set()).add(result.current.document.nonce)
        assert {number: found for number, found in nonces.items() if len(found) > 1} == {}
        with contextlib.closing(open_coordinator(self._url)) as coordinator:
            current = coordinator.read()
        assert current is not None
        assert max(nonces) <= current.document.version
        tried = Counter(result.sent.version for result in self.results)
        assert sorted(tried)[: current.document.version] == list(range(1, current.document.version + 1))


def test_swaps_while_a_server_is_killed(kind: str, server: EngineServer) -> None:
    """Killed and restarted twice between requests and answers: no version has two documents."""
    with Swappers(engine_url(kind, server.port)) as swappers:
        for _ in range(2):
            swappers.wait_for_successes(20)
            server.restart()
        swappers.wait_for_successes(20)
    swappers.check()


@pytest.mark.long
def test_the_leader_of_etcd_is_killed_before_its_followers_answer(tmp_path: Path) -> None:
    """The entry is in the leader's log only, or on the way. It takes effect or is lost, and `resolve` shows which."""
    with etcd(tmp_path, members=3) as servers:
        leader = leader_of(servers)
        followers = [server for server in servers if server is not leader]
        url = engine_url("etcd", *(server.port for server in (leader, *followers)))
        others = Swappers(url.replace("orders", "others"))
        with contextlib.closing(open_coordinator(url)) as coordinator, others:
            first = created(coordinator)
            with paused(*followers), ThreadPoolExecutor(1) as pool:
                swapping = pool.submit(coordinator.swap, FIRST, first.version)
                time.sleep(0.1)  # most likely the leader has the request by then
                leader.kill()
                unknown = swapping.result()
            assert (unknown.outcome, unknown.current) == (SwapOutcome.UNKNOWN, None)
            settled_swap(coordinator, first)
            found = wait_until(lambda: resolved(coordinator, unknown, first))
            others.wait_for_successes(20)
            leader.start()
            leader.wait_until_ready()
            others.wait_for_successes(20)
            again = wait_until(lambda: resolved(coordinator, unknown, first))
            assert (again.outcome, again.current) == (found.outcome, found.current)
        others.check()


def resolved(coordinator: Coordinator, swapped: SwapResult, before: VersionedDocument) -> SwapResult | None:
    """Return what became of a swap, once it is not unknown."""
    result = coordinator.resolve(swapped.sent, before.version)
    return None if result.outcome is SwapOutcome.UNKNOWN else result


def leader_of(servers: list[EngineServer]) -> EngineServer:
    """Return the leading member of etcd."""
    for server in servers:
        answer: dict[str, Any] = ask_etcd(server.port, "maintenance/status", {})
        if answer["leader"] == answer["header"]["member_id"]:
            return server
    raise AssertionError("no member leads")


def test_a_document_of_another_program_is_refused(kind: str, server: EngineServer) -> None:
    """Rubbish, nothing, and too much: errors, as with an object store."""
    with contextlib.closing(open_coordinator(engine_url(kind, server.port))) as coordinator:
        engine = coordinator._engine
        tag = engine.compare_and_swap("cluster.json", b"", None)
        for data in (b"{}", b"\xff\x00", b"x" * 70_000, b"x" * 400_000):
            with pytest.raises(CoordinatorRefused, match=r"the cluster document is damaged|bytes"):
                coordinator.read()
            with pytest.raises(CoordinatorRefused):
                coordinator.wait(None, 3600)
            tag = engine.compare_and_swap("cluster.json", data, tag)
