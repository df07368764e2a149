"""pytest fixtures: a server of Kafka's protocol for each test, and topics in it. See `docs/testing.md`.

pytest loads this file in every run if the package is installed. So it imports large modules only when a test requests
a server.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import pytest

if TYPE_CHECKING:
    from segmentlog.security.security_settings import Security
    from segmentlog.server.embedded import Server
    from segmentlog.server.server_settings import ServerSettings
    from segmentlog.store import LogStore

Scope = Literal["session", "package", "module", "class", "function"]

_MARKER = "segmentlog"
_FIXTURE = "segmentlog_server"
_MIN_SESSION_TIMEOUT_MS = 100
"""Smallest session timeout of group members. With Kafka's six seconds, a test waits long for a dead member."""
_SLUG_MAX = 40
_serial = itertools.count()


class ServerOfTests:
    """A server in threads of this process, with its own store folder."""

    def __init__(self, path: Path, scope: str, node: Any, fixture: str, options: dict[str, Any]) -> None:
        import segmentlog
        from segmentlog.server.embedded import Server

        settings, security = _settings(options)
        self.path = path
        """The folder of the store. It is deleted at the end, unless a test that used it failed."""
        self.default_partitions = settings.default_partitions
        self._scope, self._node, self._fixture = scope, node, fixture
        self._failed = self._closed = False
        self.store: LogStore = segmentlog.open(path)
        """The server's store, for use as a library in the test."""
        try:
            self._server: Server = Server(
                self.store, host="127.0.0.1", port=0, advertise=None, settings=settings, security=security,
                owns_store=False,
            )  # fmt: skip
        except BaseException:
            self.store.close()
            raise
        self.bootstrap_servers = self._server.bootstrap_servers
        """The value of a Kafka client's `bootstrap.servers`."""

    def __repr__(self) -> str:
        return f"<segmentlog server {self.bootstrap_servers} of {self.path}>"

    def close(self) -> None:
        """Close the server and its store, and disconnect all clients. Idempotent."""
        try:
            self._server.close()
        finally:
            self.store.close()
            self._closed = True

    def is_used_by(self, item: pytest.Item) -> bool:
        """Return whether this test uses the server, perhaps together with other tests."""
        return self._node is item or self._fixture in getattr(item, "fixturenames", ())


def _settings(options: dict[str, Any]) -> tuple[ServerSettings, Security]:
    from segmentlog.security.security_settings import Security
    from segmentlog.server.groups.classic_types import GroupSettings
    from segmentlog.server.server_settings import ServerSettings

    of_serving = {name for name in ServerSettings.__struct_fields__ if name not in ("limits", "groups")}
    of_security = set(Security.__struct_fields__)
    unknown = sorted(options.keys() - of_serving - of_security)
    if unknown:
        known = ", ".join(sorted(of_serving | of_security))
        raise pytest.UsageError(f"unknown options of a segmentlog server: {', '.join(unknown)}; valid are {known}")
    groups = GroupSettings(min_session_timeout_ms=_MIN_SESSION_TIMEOUT_MS)
    settings = ServerSettings(groups=groups, **{name: options[name] for name in options if name in of_serving})
    return settings, Security(**{name: options[name] for name in options if name in of_security})


_servers = pytest.StashKey[list[ServerOfTests]]()


def _started(config: pytest.Config) -> list[ServerOfTests]:
    return config.stash.setdefault(_servers, [])


# ------------------------------------------------------------ fixtures


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:_SLUG_MAX].strip("-") or "test"


def _serve(request: pytest.FixtureRequest, options: dict[str, Any]) -> Iterator[ServerOfTests]:
    factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    path = factory.mktemp(f"segmentlog-{_slug(request.node.name or 'session')}")
    server = ServerOfTests(path, request.scope, request.node, request.fixturename or _FIXTURE, options)
    _started(request.config).append(server)
    try:
        yield server
    finally:
        server.close()


def _options_of(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the options of the fixture's parameter and markers. The marker nearest to the test takes precedence."""
    options: dict[str, Any] = {}
    for marker in request.node.iter_markers(_MARKER):
        if marker.args:
            raise pytest.UsageError(f"@pytest.mark.{_MARKER} accepts only keyword arguments")
        options = {**marker.kwargs, **options}
    return {**options, **getattr(request, "param", {})}


def server_fixture(scope: Scope = "function", **options: Any) -> Any:
    """Return a fixture for another server: ``durable = server_fixture(scope="session", durable_reads=True)``."""

    @pytest.fixture(scope=scope)
    def server(request: pytest.FixtureRequest) -> Iterator[ServerOfTests]:
        yield from _serve(request, {**options, **getattr(request, "param", {})})

    return server


def _chosen_scope(fixture_name: str, config: pytest.Config) -> Scope:
    chosen = config.getoption("segmentlog_scope") or config.getini("segmentlog_scope")
    if chosen not in get_args(Scope):
        raise pytest.UsageError(f"segmentlog_scope is {chosen!r}, but must be one of {', '.join(get_args(Scope))}")
    return cast(Scope, chosen)


@pytest.fixture(scope=_chosen_scope)
def segmentlog_server(request: pytest.FixtureRequest) -> Iterator[ServerOfTests]:
    """Yield a server of Kafka's protocol: ``bootstrap_servers`` for clients, ``store`` for access as a library."""
    yield from _serve(request, _options_of(request))


@pytest.fixture
def segmentlog_topic(request: pytest.FixtureRequest, segmentlog_server: ServerOfTests) -> str:
    """Return the name of a new topic. Parameter: a number of partitions, or options of `LogStore.create_topic`."""
    wanted = getattr(request, "param", {})
    options = {"partitions": wanted} if isinstance(wanted, int) else dict(wanted)
    options.setdefault("partitions", segmentlog_server.default_partitions)
    name = f"{_slug(request.node.name)}-{next(_serial)}"
    segmentlog_server.store.create_topic(name, **options)
    return name


# ------------------------------------------------------------ hooks of pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the scope of a server."""
    text = "how long a segmentlog server of tests lives: function (default), class, module, package or session"
    parser.addini("segmentlog_scope", text, default="function")
    parser.getgroup("segmentlog").addoption("--segmentlog-scope", choices=get_args(Scope), help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    line = f"{_MARKER}(**options): how the segmentlog server of a test serves, e.g. acks_all='written'"
    config.addinivalue_line("markers", line)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a marker whose options would be ignored, because other tests share the server."""
    if _FIXTURE not in getattr(item, "fixturenames", ()) or next(item.iter_markers(_MARKER), None) is None:
        return
    callspec = getattr(item, "callspec", None)
    if callspec is not None and _FIXTURE in callspec.params:
        return
    scope = _chosen_scope(_FIXTURE, item.config)
    kind: Callable[[pytest.Item], Any] = {
        "function": lambda item: item,
        "class": lambda item: item.getparent(pytest.Class) or item,
        "module": lambda item: item.getparent(pytest.Module),
        "package": lambda item: item.session,
        "session": lambda item: item.session,
    }[scope]
    shared = set(kind(item).listchain())
    if any(node not in shared for node, _ in item.iter_markers_with_node(_MARKER)):
        raise pytest.UsageError(
            f"@pytest.mark.{_MARKER} applies to only a part of the tests that share the server (scope {scope})"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Report the store folder of a failed test, and keep it. Delete the folders of all other closed servers."""
    report: Any = yield
    servers = item.config.stash.get(_servers, None)
    if servers:
        if report.failed:
            for server in servers:
                if server.is_used_by(item):
                    server._failed = True
                    report.sections.append(("segmentlog", f"the store is kept: segmentlog --dir {server.path} topics"))
        if call.when == "teardown":
            _remove_closed(servers)
    return cast(None, report)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Delete the folders of servers that are left because the run ended early."""
    _remove_closed(config.stash.get(_servers, []))


def _remove_closed(servers: list[ServerOfTests]) -> None:
    for server in servers:
        if server._closed and not server._failed:
            shutil.rmtree(server.path, ignore_errors=True)
    servers[:] = [server for server in servers if not server._closed]
