"""What people build around Kafka, on our server and on Kafka in turns: ``python -m bench.ecosystem --rounds 3``.

As `bench.server`, whose rounds these are; some eight minutes. ``--again ROW`` measures one row of the results in
``--out`` once more, and keeps the others.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import msgspec

from bench import results
from bench.arguments import existing_folder, one_or_more
from bench.ecosystem import groups, streams, transactions
from bench.machine import describe
from bench.server.__main__ import _chosen, _measure, _merged, _other_than, _show, _versions
from bench.server.brokers import BROKERS
from bench.server.rows import QUICK, TINY, Absent, Row, Settings

SIZES = msgspec.structs.replace(QUICK, client_records=100_000, seconds=5.0, warm_up_s=0)
_TINY = msgspec.structs.replace(TINY, client_records=2_000)


def all_rows() -> list[Row]:
    """Every one, those that take the same servers one after the other."""
    return [*streams.rows(), *transactions.rows(), *groups.rows()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=one_or_more, default=3, help="rounds that count (default: 3)")
    parser.add_argument("--rows", default="", help="some of them, with commas between")
    parser.add_argument("--again", default="", metavar="ROW", help="measure these once more, and keep the others")
    parser.add_argument("--list", action="store_true", help="name the rows, and do nothing")
    parser.add_argument("--tiny", action="store_true", help="next to nothing of each: to see that it runs")
    parser.add_argument("--systems", default=",".join(BROKERS), help="one of them or both: " + ", ".join(BROKERS))
    parser.add_argument("--records", type=one_or_more, help="that the Streams application counts (default: 100,000)")
    parser.add_argument("--out", type=Path, help="folder for the results (default: today's below bench/results)")
    parser.add_argument("--dir", type=existing_folder, help="folder on the disk to measure (default: a temporary one)")
    options = parser.parse_args()
    rows = _chosen(parser, all_rows(), options.again or options.rows)
    if options.list:
        print("\n".join(row.name for row in rows))
        return 0
    systems = [name.strip() for name in options.systems.split(",")]
    if unknown := [name for name in systems if name not in BROKERS]:
        parser.error(f"there is no {unknown[0]!r}; there are: {', '.join(BROKERS)}")
    sizes = _TINY if options.tiny else SIZES
    if options.records is not None:
        sizes = msgspec.structs.replace(sizes, client_records=options.records)
    absent: list[Absent] = []
    settings = Settings(options.rounds, sizes, _versions(systems, absent), absent)
    out = options.out or results.default_folder()
    earlier = results.load(out, "ecosystem") if options.again else None
    if options.again and earlier is None:
        parser.error(f"--again: {out} holds no ecosystem.json")
    if earlier is not None and (what := _other_than(earlier, settings)):
        parser.error(f"--again: other {what} than what is there")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed server has its bytecode
    began_s = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="segmentlog-ecosystem-", dir=options.dir))
    try:
        machine = describe(folder, ("confluent-kafka",))
        found = _measure(rows, list(settings.versions), folder, sizes, options.rounds, absent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if earlier is None:
        seconds = time.perf_counter() - began_s
        path = results.save(out, "ecosystem", machine, seconds, msgspec.to_builtins(settings), found)
    else:
        path = results.replace(out, _merged(earlier, found, machine.revision))
    _show(found, absent)
    print(path)
    return 1 if any("failed" in one.reason for one in absent) else 0


if __name__ == "__main__":
    raise SystemExit(main())
