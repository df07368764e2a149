"""What a figure depends on and cannot say itself: the machine, its disk, the versions, and how noisy it was."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import cramjam
import msgspec

from bench import interpreter
from segmentlog.cli.bench_command import IMPLAUSIBLE_FSYNC_US, time_fdatasync

_NOISE_SAMPLES = 40


class Latency(msgspec.Struct, frozen=True):
    """A distribution of times, in microseconds."""

    p50: float
    p99: float
    p999: float
    max: float


class Noise(msgspec.Struct, frozen=True):
    """How much the same piece of work (LZ4 over a megabyte) differs on this machine.

    ``spread`` is the 90th percentile over the 10th: 1.0 on a machine of one's own.
    ``steal`` is the part of all processor time that the hypervisor gave to others meanwhile.
    """

    spread: float
    steal: float


class Machine(msgspec.Struct, frozen=True):
    """Where and with what something was measured."""

    name: str
    cpu: str
    cores: int
    memory_gb: float
    system: str
    file_system: str
    python: str
    revision: str
    versions: dict[str, str]
    fdatasync_us: Latency
    noise: Noise
    python_build: str = ""
    """How the interpreter was built (`interpreter.describe_build`); empty in results that are older than this field."""

    @property
    def python_text(self) -> str:
        """The interpreter and how it was built."""
        return f"{self.python} ({self.python_build})" if self.python_build else self.python

    @property
    def is_fsync_plausible(self) -> bool:
        return self.fdatasync_us.p50 >= IMPLAUSIBLE_FSYNC_US

    @property
    def fsync_warning(self) -> str:
        """A sentence where the disk answers faster than a disk can; empty otherwise."""
        if self.is_fsync_plausible:
            return ""
        return (
            f"A median of {self.fdatasync_us.p50:.0f} us is implausibly fast for an fdatasync: the disk, or the machine"
            " that pretends to be one, probably answers from a cache that a power cut empties."
        )


def describe(folder: str | os.PathLike[str], packages: Iterable[str] = ()) -> Machine:
    """Describe this machine, and the disk of ``folder``; takes about a second.

    ``packages``: further distributions whose versions matter; those that are not installed are left out.
    """
    return Machine(
        name=machine_name(),
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        system=f"{platform.system()} {platform.release()}",
        file_system=_file_system(Path(folder)),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        python_build=interpreter.describe_build(),
        revision=_revision(),
        versions=_versions(("segmentlog", "numpy", "msgspec", "lz4", "xxhash", *packages)),
        fdatasync_us=raw_fdatasync(Path(folder)),
        noise=measure_noise(),
    )


def machine_name() -> str:
    """Return a short name for folders: the processor and the cores, as host names say nothing to others."""
    words = re.sub(r"\(.*?\)|CPU|Processor|@.*", " ", _cpu())
    return f"{re.sub(r'[^a-z0-9]+', '-', words.lower()).strip('-') or platform.machine()}-{os.cpu_count()}-cores"


def raw_fdatasync(folder: Path, count: int = 400, size: int = 512) -> Latency:
    """One ``pwrite`` of ``size`` bytes and one ``fdatasync``, as ``segmentlog bench`` times them."""
    return latency(time_fdatasync(folder / ".raw-fdatasync", count, size))


def latency(times_us: list[float]) -> Latency:
    """Return the distribution of ``times_us``, which must not be empty."""
    ordered = sorted(times_us)
    last = len(ordered) - 1

    def at(part: float) -> float:
        return round(ordered[min(last, int(len(ordered) * part))], 1)

    return Latency(p50=at(0.5), p99=at(0.99), p999=at(0.999), max=round(ordered[-1], 1))


def measure_noise() -> Noise:
    """Do the same some forty times, and tell how much the times differ."""
    block = bytes(range(256)) * 4096
    before = _processor_times()
    times = []
    for _ in range(_NOISE_SAMPLES):
        started = time.perf_counter()
        for _ in range(20):
            cramjam.lz4.compress_block(block, store_size=False)
        times.append(time.perf_counter() - started)
    after = _processor_times()
    deciles = statistics.quantiles(times, n=10)
    total = sum(after) - sum(before)
    steal = (after[7] - before[7]) / total if total and len(after) > 7 else 0.0
    return Noise(spread=round(deciles[-1] / deciles[0], 2), steal=round(steal, 3))


def _processor_times() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return [0] * 10


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _file_system(folder: Path) -> str:
    """Its type and the options that decide what an fsync is."""
    found, longest = "unknown", -1
    with contextlib.suppress(OSError):
        real = os.path.realpath(folder)
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _device, point, kind, options, *_ = line.split()
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= longest:
                chosen = [o for o in options.split(",") if o.startswith(("barrier", "nobarrier", "data=", "sync"))]
                found, longest = " ".join([kind, *chosen]), len(point)
    return found


def _revision() -> str:
    """Return the commit of this checkout, with a plus if the tree differs from it; empty outside of a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "../segmentlog", ".", ":!results")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _versions(packages: Iterable[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def own_bytes(pid: int) -> int:
    """Resident memory of a process that no file is behind (RssAnon); 0 once it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
    return 0
