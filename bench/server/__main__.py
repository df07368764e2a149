"""The server against Kafka, by the same clients on the same machine, in turns: ``python -m bench.server``.

Both servers run at once, and each round measures either of them once, the other one first in every second round; the
first round is for warming up. ``--full`` takes the sizes that docs/bench-server.md is made of: 5 GB for a restart,
2,000 connections. What a row needs and is not there (Java, a second core) is said, and the row is left out, or ours
is measured alone.

Rows are named ``produce/java-1`` and so on (``--list``); ``--rows produce,start`` takes all that begin so.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from bench import results
from bench.arguments import existing_folder, one_or_more
from bench.machine import describe
from bench.results import Measured
from bench.server import consuming, latency, local, producing, scaling, starting
from bench.server.brokers import BROKERS, Broker, Start, last_core
from bench.server.rows import FULL, QUICK, TINY, Absent, Again, Result, Row, Settings, Side, Sizes, measure
from bench.systems.base import Unavailable
from bench.systems.servers import ServerFailed

_CLIENTS = ("confluent-kafka",)


def all_rows(sizes: Sizes) -> list[Row]:
    """Every one, those that take the same servers one after the other."""
    rows = [
        *producing.rows(),
        *consuming.rows(),
        *latency.rows(),
        *scaling.rows(sizes),
        *starting.rows(),
        *local.rows(),
    ]
    return sorted(rows, key=lambda row: (row.start is None, row.start != Start(), row.start != Start(last_core())))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the sizes that count: about an hour, 15 GB free")
    parser.add_argument("--tiny", action="store_true", help="next to nothing of each: to see that it runs")
    parser.add_argument("--rows", default="", help="some of them, with commas between")
    parser.add_argument("--list", action="store_true", help="name the rows, and do nothing")
    parser.add_argument("--systems", default=",".join(BROKERS), help="one of them or both: " + ", ".join(BROKERS))
    parser.add_argument("--rounds", type=one_or_more, help="rounds that count (default 3; full 5)")
    parser.add_argument("--seconds", type=float, help="of each piece that our own client measures")
    parser.add_argument("--records", type=one_or_more, help="of each run of Java's tool and confluent-kafka")
    parser.add_argument("--gb", type=float, help="on disk when the server is killed")
    parser.add_argument("--out", type=Path, help="folder for the results (default: today's below bench/results)")
    parser.add_argument("--again", action="store_true", help="keep the other rows that --out holds, of the same sizes")
    parser.add_argument("--dir", type=existing_folder, help="folder on the disk to measure (default: a temporary one)")
    options = parser.parse_args()
    sizes = _sizes(options)
    rows = _chosen(parser, all_rows(sizes), options.rows)
    if options.list:
        print("\n".join(row.name for row in rows))
        return 0
    systems = [name.strip() for name in options.systems.split(",")]
    if unknown := [name for name in systems if name not in BROKERS]:
        parser.error(f"there is no {unknown[0]!r}; there are: {', '.join(BROKERS)}")
    absent: list[Absent] = []
    versions = _versions(systems, absent)
    rounds = options.rounds or (5 if options.full else 1 if options.tiny else 3)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed server has its bytecode
    out = options.out or results.default_folder()
    earlier = results.load(out, "server") if options.again else None
    if options.again and earlier is None:
        parser.error(f"--again: {out} holds no server.json")
    settings = Settings(rounds, sizes, versions, absent)
    if earlier is not None and (what := _other_than(earlier, settings)):
        parser.error(f"--again: other {what} than what is there")
    began_s = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="segmentlog-server-", dir=options.dir))
    try:
        machine = describe(folder, _CLIENTS)
        if earlier is not None and (earlier.machine.cpu, earlier.machine.cores) != (machine.cpu, machine.cores):
            parser.error(f"--again: what is there was measured on another machine, {earlier.machine.cpu}")
        found = _measure(rows, list(versions), folder, sizes, rounds, absent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = time.perf_counter() - began_s
    if earlier is None:
        path = results.save(out, "server", machine, seconds, msgspec.to_builtins(settings), found)
    else:
        path = results.replace(out, _merged(earlier, found, machine.revision))
    _show(found, absent)
    print(path)
    return 1 if any("failed" in one.reason for one in absent) else 0


def _other_than(earlier: Measured, settings: Settings) -> str:
    """Why rows that are measured so cannot stand beside those; empty if they can."""
    before = msgspec.convert(earlier.settings, Settings)
    names = ("rounds", "sizes", "versions")
    return ", ".join(name for name in names if getattr(before, name) != getattr(settings, name))


def _merged(earlier: Measured, found: Sequence[Result], revision: str) -> Measured:
    """``earlier`` with these rows in place of its own."""
    kept = results.load_rows(earlier, Result)
    again = list(dict.fromkeys(one.row for one in found))
    order = dict.fromkeys(one.row for one in [*kept, *found])
    rows = [one for name in order for one in (found if name in again else kept) if one.row == name]
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    before = msgspec.convert(earlier.settings, Settings)
    settings = msgspec.structs.replace(before, again=[*before.again, Again(again, date, revision)])
    return msgspec.structs.replace(earlier, settings=msgspec.to_builtins(settings), rows=rows)


def _sizes(options: argparse.Namespace) -> Sizes:
    sizes = FULL if options.full else TINY if options.tiny else QUICK
    changed = {"seconds": options.seconds, "client_records": options.records, "restart_gb": options.gb}
    return msgspec.structs.replace(sizes, **{name: value for name, value in changed.items() if value is not None})


def _chosen(parser: argparse.ArgumentParser, rows: Sequence[Row], names: str) -> list[Row]:
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if not any(row.name.startswith(name) for row in rows):
            parser.error(f"there is no row {name!r}; there are: {', '.join(row.name for row in rows)}")
    return [row for row in rows if not wanted or any(row.name.startswith(name) for name in wanted)]


def _versions(systems: Sequence[str], absent: list[Absent]) -> dict[str, str]:
    found = {}
    for system in systems:
        try:
            found[system] = BROKERS[system].version()
        except Unavailable as error:
            absent.append(Absent(system, str(error)))
    return found


def _measure(
    rows: Sequence[Row], systems: Sequence[str], folder: Path, sizes: Sizes, rounds: int, absent: list[Absent]
) -> list[Result]:
    """All rows; one that fails is told, and the others go on with servers of their own."""
    found: list[Result] = []
    left = list(rows)
    while left:
        start = left[0].start
        try:
            with _running(start, systems, folder) as running:
                while left and left[0].start == start:
                    row = left.pop(0)
                    try:
                        with _sides(row, systems, folder, sizes, running) as sides:
                            found += measure(row, sides, rounds, _tell, quiet_disk=sizes != TINY)
                    except Unavailable as error:
                        absent.append(Absent(row.name, str(error)))
                    except Exception as error:
                        absent.append(_failed(row, error))
                        break
        except Unavailable as error:
            absent += [Absent(row.name, str(error)) for row in left if row.start == start]
            left = [row for row in left if row.start != start]
        except ServerFailed as error:
            absent += [_failed(row, error) for row in left if row.start == start]
            left = [row for row in left if row.start != start]
    return found


def _failed(row: Row, error: Exception) -> Absent:
    absent = Absent(row.name, f"failed: {type(error).__name__}: {error}")
    _tell(f"{row.name} {absent.reason}")
    return absent


@contextmanager
def _running(start: Start | None, systems: Sequence[str], folder: Path) -> Iterator[dict[str, Broker]]:
    """Yield the running servers that rows share if they need no other settings."""
    if start is None:
        yield {}
        return
    base = Path(tempfile.mkdtemp(prefix="shared-", dir=folder))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        running = {}
        for system in systems:
            broker = BROKERS[system](base / system, start)
            stack.callback(broker.stop)
            _tell(f"{system} is started")
            broker.start()
            running[system] = broker
        yield running


@contextmanager
def _sides(
    row: Row, systems: Sequence[str], folder: Path, sizes: Sizes, running: dict[str, Broker]
) -> Iterator[dict[str, Side]]:
    base = Path(tempfile.mkdtemp(prefix="row-", dir=folder))
    try:
        yield {
            system: Side(system, base / system, sizes, row.start, running.get(system))
            for system in systems
            if system in row.systems
        }
    finally:
        shutil.rmtree(base, ignore_errors=True)


# ---------------------------------------------------------------- what is told


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(found: Sequence[Result], absent: Sequence[Absent]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    table = Table("", "ours", "Kafka, or what else", "ratio", "range", "wanted", title="segmentlog serve")
    for name in table.columns[1:]:
        name.justify = "right"
    group = ""
    for one in found:
        if one.group != group:
            table.add_section()
            table.add_row(f"[bold]{one.group}")
            group = one.group
        table.add_row(*one.cells(), style="red" if one.reached is False else None)
    console.print(table)
    for left in absent:
        console.print(f"left out: {left.what}: {left.reason}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
