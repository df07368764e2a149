"""Rows along an axis: partitions, and connections of which most are idle; each figure against its neighbour's."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from bench.server import load
from bench.server.batches import batch
from bench.server.brokers import Start
from bench.server.load import Lane
from bench.server.producing import producer_lanes
from bench.server.rows import Compared, Figures, Once, Row, Side, Sizes
from bench.server.wire import LEADER, Address, Topic, fetches_of

_MOST_BYTES = 1 << 30
_ACTIVE = 16
"""Connections that do something, at the most; the others have said hello."""
_SMALL, _LARGE = 1, 1000
_WORKER_MB = 150
_BATCH = 100
_FETCH_BYTES = 64 << 10


def rows(sizes: Sizes) -> list[Row]:
    """All of them."""
    found = [_partitions(sizes.partitions)]
    for records, kind in ((_SMALL, "small"), (_LARGE, "large")):
        found.append(_connections(sizes.connections, records, kind))
    return found


# ---------------------------------------------------------------- partitions


def _partitions(most: int) -> Row:
    counts = (1, most)
    compared: list[Compared] = []
    for work in ("produce", "fetch"):
        compared += _neighbours(work, counts, lambda count: f"{count:,} partition{'s' if count > 1 else ''}")
    compared += _memory(f"{most:,} partitions", str(most))

    @contextmanager
    def prepare(side: Side) -> Iterator[Once]:
        yield lambda: {name: figure for count in counts for name, figure in _at_partitions(side, count).items()}

    return Row("partitions", f"1 and {most:,} partitions", compared, prepare, start=Start(of="partitions"))


def _at_partitions(side: Side, count: int) -> Figures:
    found: Figures = {}
    with side.new_topic(count) as topic:
        one = batch(_BATCH)
        lanes = producer_lanes(topic, one, 4, 4, LEADER)
        # Partitions are opened as they are first written to: once, and not what is measured here.
        load.run(lanes, 60, 2 * count * len(one))
        done = load.run(lanes, side.sizes.seconds, _MOST_BYTES)
        found[f"produce {count}"] = sum(done.answered) * _BATCH / done.seconds
        _close(lanes)
        lanes, records = _consumer_lanes(topic, 4)
        done = load.run(lanes, side.sizes.seconds)
        read = sum(answered * each for answered, each in zip(done.answered, records, strict=True))
        found[f"fetch {count}"] = read / done.seconds
        _close(lanes)
        found.update(_memory_figures(side, str(count)))
    return found


def _consumer_lanes(topic: Topic, connections: int) -> tuple[list[Lane], list[float]]:
    """Return (connections that fetch from one partition after another, records in each one's answer)."""
    requests: dict[Address, list[bytes]] = {}
    sizes: dict[Address, list[int]] = {}
    records: dict[Address, int] = {}
    each = max(1, 256 // len(topic.leaders))
    for number, address in enumerate(topic.leaders):
        some, lengths, read = fetches_of(topic, number, _FETCH_BYTES, limit=each)
        requests.setdefault(address, []).extend(some)
        sizes.setdefault(address, []).extend(lengths)
        records[address] = records.get(address, 0) + read
    addresses = [address for address in requests if requests[address]]
    chosen = [addresses[number % len(addresses)] for number in range(connections)]
    lanes = [Lane(address, requests[address], sizes[address], 2) for address in chosen]
    return lanes, [records[address] / len(requests[address]) for address in chosen]


# ---------------------------------------------------------------- connections


def _connections(counts: Sequence[int], records: int, kind: str) -> Row:
    def text(count: int) -> str:
        return f"{kind} requests, {count:,} connection{'s' if count > 1 else ''}"

    compared = _neighbours("produce", counts, text)
    for count in counts:
        compared += _memory(text(count), str(count))

    @contextmanager
    def prepare(side: Side) -> Iterator[Once]:
        yield lambda: {
            name: figure for count in counts for name, figure in _at_connections(side, count, records).items()
        }

    group = f"1 to {max(counts):,} connections, most idle"
    return Row(f"connections/{kind}", group, compared, prepare, start=Start(of=f"connections/{kind}"))


def _at_connections(side: Side, count: int, records: int) -> Figures:
    with side.new_topic(4) as topic, ExitStack() as stack:
        active = min(count, _ACTIVE)
        lanes = producer_lanes(topic, batch(records), active, 16 if records == _SMALL else 2, LEADER)
        addresses = sorted(set(topic.leaders))
        for number, address in enumerate(addresses):
            idle: list[socket.socket] = load.idle_connections(
                address, len(range(number, count - active, len(addresses)))
            )
            for sock in idle:
                stack.callback(sock.close)
        done = load.run(lanes, side.sizes.seconds, _MOST_BYTES)
        found = _memory_figures(side, str(count))
        _close(lanes)
    found[f"produce {count}"] = sum(done.answered) * records / done.seconds
    return found


# ---------------------------------------------------------------- both


def _neighbours(work: str, counts: Sequence[int], text: object) -> list[Compared]:
    """Each count against the one before it, and against Kafka."""
    assert callable(text)
    found: list[Compared] = []
    for before, count in zip((None, *counts), counts, strict=False):
        name = f"{work} {count}"
        if before is not None:
            what = f"{work}, {text(count)}, against {before:,}"
            found.append(Compared(name, what, "records/s", 0.7, to=f"{work} {before}"))
        found.append(Compared(name, f"{work}, {text(count)}", "records/s"))
    return found


def _memory(what: str, count: str) -> list[Compared]:
    """With the mapped log, which is judged, and without it."""
    return [
        Compared(f"pss {count}", f"{what}: memory of a worker (PSS)", "MB", _WORKER_MB, at_least=False, to=None),
        Compared(f"own {count}", f"{what}: of that its own", "MB", to=None),
    ]


def _memory_figures(side: Side, count: str) -> Figures:
    memory = side.broker.memory()
    return {f"pss {count}": memory.pss / 1e6, f"rss {count}": memory.rss / 1e6, f"own {count}": memory.own / 1e6}


def _close(lanes: Sequence[Lane]) -> None:
    for lane in lanes:
        lane.close()
