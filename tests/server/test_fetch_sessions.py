"""Fetch sessions have bounds: as many as there are slots, and as many partitions as there is memory for."""

from __future__ import annotations

from segmentlog.server.fetch_sessions import FetchSessions, SessionPartition


def wanted(count: int) -> list[SessionPartition]:
    """Partitions of a topic."""
    return [SessionPartition("t", b"", number, 0, 1) for number in range(count)]


def test_the_longest_unused_makes_room() -> None:
    """A session that was used a moment ago stays."""
    now_ms = 0
    sessions = FetchSessions(2, lambda: now_ms)
    first, second = sessions.create(), sessions.create()
    assert first is not None
    assert second is not None
    assert sessions.create() is None
    now_ms = 100_000
    assert sessions.find(first.id) is first
    now_ms = 130_000
    assert sessions.create() is not None
    assert sessions.find(second.id) is None
    assert sessions.find(first.id) is first


def test_partitions_of_all_sessions_are_bounded() -> None:
    """A client above the limit gets a response without a session; a closed session makes room."""
    sessions = FetchSessions(10, lambda: 0, partitions_max=100)
    first = sessions.create(60)
    assert first is not None
    first.update(wanted(60), [])
    assert sessions.create(60) is None
    sessions.close(first.id)
    assert sessions.create(60) is not None
