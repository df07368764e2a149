"""docs/bench-ecosystem.md, of a results file: ``python -m bench.ecosystem.page FOLDER [--out PAGE]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from bench import results
from bench.report import table
from bench.results import Measured
from bench.server.rows import Result, Settings

PAGE = Path(__file__).parent.parent.parent / "docs" / "bench-ecosystem.md"

_INTRODUCTION = """\
For people who want to run Kafka Streams, transactions or large groups on `segmentlog serve`. After this page you know
how fast they are there, compared with Kafka.

`python -m bench.ecosystem` measures both servers on one machine. Each round measures both, and they begin in turns.
Figures are medians of the rounds. A ratio is segmentlog / Kafka within a round: the median, with its range. Clients and
servers share the cores.
"""

_HOW = """\
- **Kafka Streams**: an application with one thread and `exactly_once_v2` counts by key, with a repartition and a
  changelog, and writes each count; its time is from its first record until it has committed and closed. What it wrote
  is then read with `read_committed`, and has to be one count a record. Server CPU is that of all of its processes.
- **a whole Streams test**: a server that has nothing yet is started, topics are made, the same application counts a
  hundred records and ends, the server is stopped.
- **transactions** are decided on disk here. Kafka has `log.flush.interval.messages=1` in these rows to promise the
  same; else it leaves it to the operating system when anything of it is on disk. confluent-kafka, one transaction
  after the other.
- **read, process, write**: confluent-kafka copies from topic to topic, positions in the same transactions.
- **rebalance**: members are confluent-kafka's, in processes of their own, and one is killed; it takes until the others
  have all partitions. In the classic protocol its session has to run out, which begins with its last heartbeat;
  in the new one as well, and the server assigns.
"""


def write_page(folder: Path, page: Path = PAGE) -> Path:
    """Make the page of ``folder/ecosystem.json``. Raises FileNotFoundError without it."""
    measured = results.load(folder, "ecosystem")
    if measured is None:
        raise FileNotFoundError(f"{folder} holds no ecosystem.json; run python -m bench.ecosystem --out {folder}")
    found = results.load_rows(measured, Result)
    settings = msgspec.convert(measured.settings, Settings)
    lines = ["# Systems around Kafka, on segmentlog and on Kafka", "", *_INTRODUCTION.splitlines(), ""]
    lines += _where(measured, settings)
    for group in dict.fromkeys(one.group for one in found):
        cells = [one.cells() for one in found if one.group == group]
        lines += [f"## {group[0].upper()}{group[1:]}", ""]
        lines += table(("", "ours", "Kafka", "ratio", "range", "wanted"), cells)
    lines += ["## How", "", *_HOW.splitlines(), ""]
    if settings.absent:
        lines += ["## What is missing", "", *(f"- {one.what}: {one.reason}." for one in settings.absent), ""]
    if missed := [one for one in found if one.reached is False]:
        lines += ["## Where we miss what was wanted", ""]
        lines += [f"- {one.group}: {one.what}: {one.target_text} was wanted" for one in missed] + [""]
    lines += ["## To repeat it", "", "```sh", measured.command, "```", ""]
    page.write_text("\n".join(lines))
    return page


def _where(measured: Measured, settings: Settings) -> list[str]:
    machine = measured.machine
    versions = {**settings.versions, **{name: machine.versions[name] for name in machine.versions if "kafka" in name}}
    lines = [
        f"{measured.date[:10]}, {machine.cpu}, {machine.cores} cores, {machine.memory_gb:g} GB; {machine.system};"
        f" {machine.file_system}; {machine.python_text};"
        f" {', '.join(f'{name} {version}' for name, version in versions.items())};"
        f" revision `{machine.revision or 'unknown'}`.",
        "",
        f"{settings.rounds} rounds after one for warming up; the Streams application counts"
        f" {settings.sizes.client_records:,} records. All of it took {measured.seconds / 60:.0f} minutes. One write and"
        f" `fdatasync` of this disk: median {machine.fdatasync_us.p50:.0f} us.",
        "",
    ]
    for again in settings.again:
        lines += [f"Measured once more at {again.date}, revision `{again.revision}`: {', '.join(again.rows)}.", ""]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the results")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page (default: docs/bench-ecosystem.md)")
    options = parser.parse_args()
    try:
        print(write_page(options.folder, options.out))
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
