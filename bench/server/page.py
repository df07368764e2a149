"""docs/bench-server.md, of a results file: ``python -m bench.server.page FOLDER [--out PAGE]``.

The figures come from there, except those of the check of batches. `bench.reasons` explains where Kafka is faster.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench import results
from bench.reasons import reason_for
from bench.report import table
from bench.results import Measured
from bench.server.rows import Result, Settings

PAGE = Path(__file__).parent.parent.parent / "docs" / "bench-server.md"

_INTRODUCTION = """\
For people who compare `segmentlog serve` with Kafka. After this page you know where each server is faster, and why.

`python -m bench.server --full` measures both servers on one machine, with the same clients. Each round measures both,
and they begin in turns. Figures are medians of the rounds. A ratio is segmentlog / Kafka (or the neighbour) within a
round: the median, with its range. Both servers have their defaults: segmentlog a worker for each core, Kafka the heap
and the flags of its start script. Kafka's log is synced only in rows that say so.
"""

_HOW = """\
- **Java's ProducerPerformance and confluent-kafka** produce to four partitions, with the defaults of each and acks=1.
  They run on the cores of the server: that one of them is slowed down by the other is part of the figure. Server CPU
  is that of all of its processes, from `/proc`.
- **Everything else** is asked by a client of our own: requests that were made beforehand are pipelined, and answers
  are counted and thrown away once their size is seen to be right. What was acknowledged is then found in the log, to
  a record.
- **acks=all** means on disk here; Kafka's topic has `flush.messages=1` to promise the same. All connections write to
  one partition, a request at a time each.
- **consume**: the server with all its threads is pinned to one core and the clients to the others. What clients wrote
  lies there in batches of 16 KiB, what the library wrote in columns of 1,000 records with LZ4, which are rendered for
  Kafka's clients; Kafka has the former in either case, of the same records.
- **connections**: at the most 16 of them produce, to four partitions; the others have said hello, and sleep.
- **partitions**: each was written to before; one request is one batch of 100 records for one partition.
- **memory** is that of the server's largest process: PSS, which has its part of the mapped log; what no file is behind
  is told beside it. These rows have servers of their own.
- **after kill -9** all processes of the server are killed at once, within milliseconds of the last record, and
  everything that was acknowledged must be there again.
"""

_CHECK = """\
The server decodes every batch of Kafka's clients before it stores the batch. `bench.server` has no row for this
check, so a separate run compared the server with the revision that had no check: 2 cores, Debian's Python 3.11 with
the compiled core, one worker. A librdkafka producer sent 16 KiB batches of about 145 records of 75 to 110 bytes. Each
of five rounds measured both revisions, one after the other. A figure is the processor time of the server for each
record; a ratio is the median of the ratios within the rounds.

|  | without the check | with the check | ratio | wanted |
| --- | --: | --: | --: | --: |
| not compressed | 0.94 us | 1.06 us | 1.16 | <= 1.15 |
| LZ4 | 0.88 us | 1.16 us | 1.30 | <= 1.15 (missed) |

The server meets the wanted ratio within the noise for uncompressed batches, and misses it for compressed batches.
There it decompresses each batch and makes about 20 Python calls. A batch of zstd takes about 25 us more than a batch
of LZ4.
"""
"""Measured apart, by hand: the revision without the check stores batches that readers refuse, and is not released."""


def write_page(folder: Path, page: Path = PAGE) -> Path:
    """Make the page of ``folder/server.json``. Raises FileNotFoundError without it."""
    measured = results.load(folder, "server")
    if measured is None:
        raise FileNotFoundError(f"{folder} holds no server.json; run python -m bench.server --out {folder}")
    found = results.load_rows(measured, Result)
    settings = msgspec.convert(measured.settings, Settings)
    lines = ["# The server against Kafka", "", *_INTRODUCTION.splitlines(), "", *_where(measured, settings)]
    for group in dict.fromkeys(one.group for one in found):
        lines += [f"## {group[0].upper()}{group[1:]}", "", *_table([one for one in found if one.group == group])]
    lines += ["## How", "", *_HOW.splitlines(), ""]
    if settings.absent:
        lines += ["## What is missing", "", *(f"- {one.what}: {one.reason}." for one in settings.absent), ""]
    lines += ["## The check of batches", "", *_CHECK.splitlines(), ""]
    lines += _where_we_lose(found)
    lines += ["## To repeat it", "", "```sh", measured.command, "```", ""]
    lines += [
        "Kafka's jars are fetched beforehand by `python -m bench.systems.kafka_jars --server` (Java 17, Maven).",
        "",
    ]
    page.write_text("\n".join(lines))
    return page


def _where(measured: Measured, settings: Settings) -> list[str]:
    machine, sizes = measured.machine, settings.sizes
    versions = {**settings.versions, **{name: machine.versions[name] for name in machine.versions if "kafka" in name}}
    lines = [
        f"{measured.date[:10]}, {machine.cpu}, {machine.cores} cores, {machine.memory_gb:g} GB; {machine.system};"
        f" {machine.file_system}; {machine.python_text};"
        f" {', '.join(f'{name} {version}' for name, version in versions.items())};"
        f" revision `{machine.revision or 'unknown'}`.",
        "",
        f"{settings.rounds} rounds after {sizes.warm_up_s:g} s or more for warming up; {sizes.seconds:g} s for each"
        " piece that our own client measures;"
        f" {sizes.client_records:,} records for one producer of Java's or confluent-kafka, half as many for each of"
        " four;"
        f" {sizes.single_records:,} single records for a latency; {sizes.log_mb:g} MB are consumed;"
        f" {sizes.restart_gb:g} GB lie on disk at the kill. All of it took {measured.seconds / 60:.0f} minutes.",
        "",
        f"One write and `fdatasync` of this disk: median {machine.fdatasync_us.p50:.0f} us, 99 % within"
        f" {machine.fdatasync_us.p99:.0f} us. Noise: the same piece of work took up to {machine.noise.spread:.2f} times"
        " as long as in its best tenth.",
        "",
    ]
    for again in settings.again:
        lines += [f"Measured once more at {again.date}, revision `{again.revision}`: {', '.join(again.rows)}.", ""]
    if machine.fsync_warning:
        lines += [f"**{machine.fsync_warning}**", ""]
    return lines


def _table(found: Sequence[Result]) -> list[str]:
    other = "Kafka" if all(one.to in ("Kafka", None) for one in found) else "Kafka, or the other figure"
    return table(("", "ours", other, "ratio", "range", "wanted"), [one.cells() for one in found])


def _where_we_lose(found: Sequence[Result]) -> list[str]:
    """List the rows that missed their target, or are slower than Kafka without one, by reason."""
    lost: dict[tuple[str, str], list[str]] = {}
    for one in found:
        is_behind = one.to == "Kafka" and one.ratio is not None and (one.ratio < 1) == (one.unit in _MORE_IS_BETTER)
        if one.reached is False or (one.reached is None and is_behind):
            _, ours, theirs, ratio, spread, target = one.cells()
            against = f" against {theirs}" if theirs else ""
            compared = f": {ratio} ({spread})" if ratio else ""
            wanted = f"; {target.removesuffix(' (missed)')} was wanted" if target else ""
            lost.setdefault((one.group, _reason(one)), []).append(f"- {one.what}: {ours}{against}{compared}{wanted}")
    lines = ["## Where we lose", ""]
    for (group, reason), rows in lost.items():
        lines += [f"**{group[0].upper()}{group[1:]}.** {reason}", "", *rows, ""]
    return lines if lost else [*lines, "Nowhere in this run, of what was measured in it.", ""]


_MORE_IS_BETTER = ("records/s", "MB/s")


def _reason(one: Result) -> str:
    return reason_for("server", one.row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the results")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page (default: docs/bench-server.md)")
    options = parser.parse_args()
    try:
        print(write_page(options.folder, options.out))
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
