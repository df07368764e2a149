"""All benches one after the other, and their report: ``python -m bench``, ``python -m bench --full``.

Each runs in a process of its own, so that none finds the memory or the caches of another. Results go to
``bench/results/<date>-<machine>``; the report is made anew after each, of whatever is there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from bench import results
from bench.arguments import existing_folder
from bench.plots import PlotsUnavailable
from bench.report import write_report

_QUICK = {
    "fsync": (),
    "limits": ("--rounds", "3"),
    "scaling": (),
}
_FULL = {
    "fsync": ("--seconds", "2"),
    "limits": ("--rounds", "5"),
    "peers": (),
    "scaling": ("--full",),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="peers too, and logs of up to 50 GB: an hour, 65 GB free")
    parser.add_argument("--only", default="", help="some of them, with commas between: " + ", ".join(_FULL))
    parser.add_argument("--out", type=Path, help="folder for the results (default: today's below bench/results)")
    parser.add_argument("--dir", type=existing_folder, help="folder on the disk to measure (default: a temporary one)")
    options = parser.parse_args()
    plan = _FULL if options.full else _QUICK
    wanted = [name.strip() for name in options.only.split(",") if name.strip()] or list(plan)
    if unknown := [name for name in wanted if name not in _FULL]:
        parser.error(f"there is no {unknown[0]!r}; there are: {', '.join(_FULL)}")
    # As one would type it: what is saved quotes it, and no folder of this machine's.
    out = os.path.relpath(options.out or results.default_folder())
    failed = []
    for name in wanted:
        command = [sys.executable, "-m", f"bench.{name}", *plan.get(name, ()), "--out", out]
        command += ["--dir", str(options.dir)] if options.dir else []
        print(f"== {' '.join(command[1:])}", file=sys.stderr, flush=True)
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
        try:
            report = write_report(Path(out))
        except (FileNotFoundError, PlotsUnavailable) as error:
            print(f"no report: {error}", file=sys.stderr)
        else:
            print(f"== the report: {report}", file=sys.stderr, flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}; see above", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
