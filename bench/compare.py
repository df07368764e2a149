"""Is this tree faster than another revision? Rows of `bench.limits` on both, in turn, on the same machine.

``python -m bench.compare main~20`` checks BASE out into a temporary worktree, and runs each row in a process of its
own: base, now; now, base; and so on, ``--rounds`` times. What changes slowly on a shared machine meets both alike.

**Both are measured by this tree's bench.** A folder for each side holds ``segmentlog``, a link to that side's
library, and ``bench``, a link to ours; processes start in it, and so import from it, whatever is installed (that is
checked). Only where our bench cannot measure BASE's library does BASE's own measure it, and the row says so: the two
figures may then differ for what the bench does. Rows of BASE that are no more in ours are named below the table.

A difference counts when the worst round of one side is better than the best of the other. Of two equal sides that
have five rounds each, one in 126 looks so by chance; with fewer than three rounds nothing is said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, Literal

import msgspec

from bench.arguments import existing_folder
from bench.measure import RowResult, quantity
from segmentlog.speedups import COMPILED

TREE: Final = Path(__file__).resolve().parent.parent

_FEWEST_ROUNDS: Final = 3

_PROBE: Final = """
import json, os, sys
import segmentlog
print(os.path.realpath(os.path.dirname(segmentlog.__file__)))
import bench.limits
print(json.dumps([row.name for row in bench.limits.rows()]))
"""

Verdict = Literal["faster", "slower", "same", "too few rounds"]


class CompareFailed(RuntimeError):
    """There is nothing to compare; says why."""


class Compared(msgspec.Struct, frozen=True):
    """One row on both sides. ``base_figures`` and ``now_figures`` have the rounds in their order."""

    name: str
    unit: str
    more_is_better: bool
    base_figures: tuple[float, ...]
    now_figures: tuple[float, ...]
    note: str = ""

    @property
    def ratios(self) -> list[float]:
        """now / base of each round."""
        return [now / base for base, now in zip(self.base_figures, self.now_figures, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def verdict(self) -> Verdict:
        """Whether the difference is more than the spread: the sides' figures do not overlap."""
        if len(self.ratios) < _FEWEST_ROUNDS:
            return "too few rounds"
        if min(self.now_figures) > max(self.base_figures):
            return "faster" if self.more_is_better else "slower"
        if max(self.now_figures) < min(self.base_figures):
            return "slower" if self.more_is_better else "faster"
        return "same"


class Missing(msgspec.Struct, frozen=True):
    """A row that one side does not have, or that failed on one."""

    name: str
    why: str


class Side:
    """A library and a bench that measures it: a folder in which both are found first."""

    def __init__(self, folder: Path, library: Path, bench: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "segmentlog").symlink_to(library / "segmentlog")
        (folder / "bench").symlink_to(bench / "bench")
        self._library = library / "segmentlog"

    def rows(self) -> list[str]:
        """Return the names of the bench's rows.

        Raises `CompareFailed` if the bench cannot be imported, or would measure another library.
        """
        imported, names = self._python("-c", _PROBE).splitlines()[-2:]
        if imported != os.path.realpath(self._library):
            raise CompareFailed(f"{imported} would be measured in place of {self._library}")
        return [str(name) for name in json.loads(names)]

    def measure(self, name: str, scale: float) -> RowResult:
        """One round of a row. Raises `CompareFailed` with what the bench said last."""
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        try:
            arguments = ["--rounds", "1", "--only", name, "--scale", str(scale), "--json", "--dir", str(data)]
            text = self._python("-m", "bench.limits", *arguments)
        finally:
            shutil.rmtree(data, ignore_errors=True)
        # ``--only`` looks for a part of the name.
        found = [row for line in text.splitlines() if (row := json.loads(line))["name"] == name]
        if not found:
            raise CompareFailed(f"there is no row {name!r}")
        return _row_result(found[0])

    def _python(self, *arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        environment.pop("PYTHONSAFEPATH", None)
        # A session of its own: whatever a row has started ends with it.
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, error = process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode:
            raise CompareFailed((error.strip().splitlines() or [f"it ended with {process.returncode}"])[-1])
        return out


def _row_result(found: dict[str, object]) -> RowResult:
    """Return a row of this or an older bench, which may say less."""
    return msgspec.convert({"limit": None, **found}, type=RowResult)


@contextlib.contextmanager
def worktree(revision: str, folder: Path) -> Iterator[Path]:
    """Yield a worktree of the revision below ``folder``, and remove it at the end.

    Raises `CompareFailed` for an unknown revision.
    """
    tree = folder / "base"
    try:
        commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except CompareFailed as error:
        raise CompareFailed(f"{revision!r} is no revision of the repository at {TREE}{error}") from None
    try:
        _git("worktree", "add", "--detach", "--quiet", str(tree), commit)
        _compile_core(tree)
        yield tree
    finally:
        with contextlib.suppress(CompareFailed):  # it may not have been made yet
            _git("worktree", "remove", "--force", str(tree))


def _compile_core(tree: Path) -> None:
    """Compile the core of that tree where ours is compiled: else the way would be measured and not the revision."""
    if not COMPILED or not (tree / "setup.py").exists():
        return
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode or not list((tree / "segmentlog" / "speedups").glob("*.so")):
        last = (done.stderr.strip().splitlines() or ["nothing was compiled"])[-1]
        raise CompareFailed(f"the core of BASE cannot be compiled, and ours is: {last}")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(TREE), *arguments], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise CompareFailed(": there is no git here") from None
    except subprocess.CalledProcessError as error:
        raise CompareFailed(f": {error.stderr.strip()}" if error.stderr.strip() else "") from None
    return done.stdout.strip()


class Comparison:
    """Base and now, with the rows that can be measured on both."""

    def __init__(self, base_tree: Path, folder: Path) -> None:
        self._now = Side(folder / "now", TREE, TREE)
        self._base = Side(folder / "base-with-our-bench", base_tree, TREE)
        self._bases_own = Side(folder / "base-with-its-bench", base_tree, base_tree)
        now_names = self._now.rows()
        self.missing: list[Missing] = []
        own_names = self._names_or_none(self._bases_own)
        if self._names_or_none(self._base) is None:
            self.only_own = True
            self.names = [name for name in now_names if name in own_names] if own_names else []
            self.missing += [Missing(name, "only now") for name in now_names if name not in self.names]
        else:
            self.only_own = False
            self.names = now_names
        self.missing += [Missing(name, "only in base") for name in own_names or [] if name not in now_names]
        self._own_names = own_names or []

    @staticmethod
    def _names_or_none(side: Side) -> list[str] | None:
        try:
            return side.rows()
        except CompareFailed:
            return None

    def compare(self, name: str, rounds: int, scale: float) -> Compared | Missing:
        """Measure the row on both sides in turn."""
        base, note = self._base, ""
        if self.only_own:
            base, note = self._bases_own, "base by its own bench"
        base_rows: list[RowResult] = []
        now_rows: list[RowResult] = []
        for number in range(rounds):
            for side in ("base", "now") if number % 2 == 0 else ("now", "base"):
                if side == "now":
                    try:
                        now_rows.append(self._now.measure(name, scale))
                    except CompareFailed as error:
                        return Missing(name, f"failed now: {error}")
                    continue
                try:
                    base_rows.append(base.measure(name, scale))
                except CompareFailed as error:
                    if base_rows or base is self._bases_own or name not in self._own_names:
                        return Missing(name, f"failed in base: {error}")
                    base, note = self._bases_own, "base by its own bench"
                    try:
                        base_rows.append(base.measure(name, scale))
                    except CompareFailed as own_error:
                        return Missing(name, f"failed in base: {own_error}")
        if base_rows[0].unit != now_rows[0].unit:
            return Missing(name, f"in {base_rows[0].unit} in base, in {now_rows[0].unit} now")
        return Compared(
            name=name,
            unit=now_rows[0].unit,
            more_is_better=now_rows[0].target_text.startswith(">="),
            base_figures=tuple(row.ours for row in base_rows),
            now_figures=tuple(row.ours for row in now_rows),
            note=note,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE", help="the revision to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of alternation (default 5)")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--scale", type=float, default=0.3, help="more or less work a round (default 0.3)")
    parser.add_argument("--dir", type=existing_folder, help="folder on the disk to measure (default: a temporary one)")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    folder = Path(tempfile.mkdtemp(prefix="segmentlog-compare-", dir=options.dir))
    try:
        with _terminated_as_interrupted(), worktree(options.base, folder) as tree:
            compared, missing = _run(tree, folder, options.rounds, options.only, options.scale)
    except CompareFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the worktree is removed", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print_table(compared, missing, options.base)
    return 0


def _run(tree: Path, folder: Path, rounds: int, only: str, scale: float) -> tuple[list[Compared], list[Missing]]:
    comparison = Comparison(tree, folder)
    names = [name for name in comparison.names if only in name]
    missing = [row for row in comparison.missing if only in row.name]
    if not names and not missing:
        raise CompareFailed(f"no row's name contains {only!r}; python -m bench.limits shows them")
    compared = []
    for number, name in enumerate(names):
        print(f"{number + 1} of {len(names)}: {name}", file=sys.stderr)
        row = comparison.compare(name, rounds, scale)
        if isinstance(row, Missing):
            missing.append(row)
        else:
            compared.append(row)
    return compared, missing


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM cleans up as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def print_table(compared: Sequence[Compared], missing: Sequence[Missing], base: str) -> None:
    """Print a table for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=150 if not sys.stdout.isatty() else None)
    table = Table(title=f"this tree against {base}")
    for column in ("row", "base", "now", "now / base", "range", "", "note"):
        table.add_column(column, justify="left" if column in ("row", "", "note") else "right")
    for row in compared:
        table.add_row(
            row.name,
            quantity(statistics.median(row.base_figures), row.unit),
            quantity(statistics.median(row.now_figures), row.unit),
            f"{row.ratio:.2f}",
            f"{min(row.ratios):.2f}-{max(row.ratios):.2f}",
            row.verdict,
            row.note,
        )
    console.print(table)
    for absent in missing:
        console.print(f"not compared: {absent.name}: {absent.why}", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
