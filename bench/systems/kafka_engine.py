"""Kafka's log without Kafka around it: its own storage classes in a JVM that is driven over a pipe.

What a broker does with a batch once it has it, with the producer's encoding before and the consumer's decoding
behind it, and neither network nor protocol. `KafkaEngine.java` has the commands.
"""

from __future__ import annotations

import os
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from bench.systems import kafka_jars
from bench.systems.base import Sync, System
from bench.systems.servers import cache_folder
from bench.workload import json_records

_SOURCE = Path(__file__).with_name("KafkaEngine.java")
_CLASS = "KafkaEngine"
_POOL = (16, 1024)
"""The records that `bench.systems.host` makes: batches, and records in each."""
_NO_KEY = struct.pack(">i", -1)


class KafkaEngine(System):
    """Kafka's UnifiedLog in a JVM. The ``timed_`` methods measure there, after a warm-up; the others, over the pipe."""

    name = "Kafka's log engine"
    about = "UnifiedLog, MemoryRecords and the log cleaner of Kafka in one JVM, no network: LZ4; timed in the JVM"
    compresses = True

    def __init__(self, folder: Path, sync: Sync, *, keyed: bool) -> None:
        super().__init__(folder, sync, keyed=keyed)
        self._class_path = f"{_compiled()}:{kafka_jars.fetch_jars()}"
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def version(cls) -> str:
        kafka_jars.check_available("javac")
        return f"{kafka_jars.KAFKA_VERSION} (Java {kafka_jars.java_version()})"

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = ["java", *kafka_jars.JVM_FLAGS, "-cp", self._class_path, _CLASS]
        if " " in str(self.folder):
            raise ValueError(f"{self.folder}: commands are words between spaces; choose a folder without one")
        with open(self.folder / "engine.log", "ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        self._has_pool = False
        self._call("open", self.folder.absolute(), self.sync, str(self.keyed).lower())

    def close(self) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._call("close")
        self._forget()

    def append(self, values: Sequence[bytes], keys: Sequence[bytes] | None = None) -> None:
        self._call("put", len(values), payload=_encoded(values, keys if keys is not None else [None] * len(values)))

    def writer(self) -> Callable[[bytes], object]:
        raise NotImplementedError("its threads are the JVM's own: `timed_append_from_threads`")

    def scan_values(self) -> int:
        return self.timed_scan(full=False)[0]

    def scan_records(self) -> int:
        return self.timed_scan(full=True)[0]

    def read(self, offset: int) -> bytes:
        length = int(self._call("read", offset))
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.read(length)

    def end(self) -> int:
        return int(self._call("end"))

    def compact(self) -> None:
        self._call("compact")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._forget()

    def server_ids(self) -> list[int]:
        return [] if self._process is None else [self._process.pid]

    # ------------------------------------------------------------ measured in the JVM

    def timed_append(
        self, seconds: float, batch_records: int, most: int = (1 << 63) - 1
    ) -> tuple[int, float, list[float]]:
        """Append batches of `bench.workload`'s records for so long: records, seconds, and microseconds of each batch.

        At least one batch and at most ``most`` records, in the order in which `bench.systems.host` appends them.
        """
        self._give_pool()
        return _timed(self._call("append", min(seconds, 1e9), batch_records, min(most, (1 << 63) - 1)))

    def timed_append_from_threads(self, threads: int, seconds: float) -> tuple[int, float, list[float]]:
        """Append single records from so many threads of the JVM at once: the same figures, with each record's time."""
        self._give_pool()
        return _timed(self._call("threads", threads, seconds))

    def timed_scan(self, *, full: bool) -> tuple[int, float]:
        """Read all of it, values or whole records: records, and seconds."""
        count, seconds, _times = _timed(self._call("scan", "records" if full else "values"))
        return count, seconds

    def timed_reads(self, count: int, seed: int) -> list[float]:
        """Read at random offsets: the microseconds of each read."""
        return _timed(self._call("reads", count, seed))[2]

    # ------------------------------------------------------------ the pipe

    def _give_pool(self) -> None:
        if not self._has_pool:
            work = json_records(*_POOL)
            values = [value for batch in work.values for value in batch]
            keys = [key for batch in work.keys for key in batch]
            self._call("pool", len(values), payload=_encoded(values, keys))
            self._has_pool = True

    def _call(self, *words: object, payload: bytes = b"") -> str:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeError("the log is not open")
        try:
            process.stdin.write(" ".join(map(str, words)).encode() + b"\n" + payload)
            process.stdin.flush()
        except BrokenPipeError:  # it ended; the empty answer below says so
            pass
        answer = process.stdout.readline().decode()
        if not answer:
            said = (self.folder / "engine.log").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the JVM ended in {words[0]!r}; the end of its log: {said}")
        if answer.startswith("error "):
            raise RuntimeError(answer.strip())
        return answer

    def _forget(self) -> None:
        assert self._process is not None
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait()
        self._process = None


def _encoded(values: Iterable[bytes], keys: Iterable[bytes | None]) -> bytes:
    """Return the records as `KafkaEngine.java` reads them: size of the key, the key, size of the value, the value."""
    parts: list[bytes] = []
    for key, value in zip(keys, values, strict=True):
        parts += (_NO_KEY,) if key is None else (struct.pack(">i", len(key)), key)
        parts += (struct.pack(">i", len(value)), value)
    return b"".join(parts)


def _timed(answer: str) -> tuple[int, float, list[float]]:
    count, seconds, *times = answer.split()
    return int(count), float(seconds), [float(time) for time in times[0].split(",")] if times else []


def _compiled() -> Path:
    """Return the folder of the driver's class, compiled if its source is newer."""
    jars = kafka_jars.fetch_jars()
    folder = cache_folder() / f"kafka-engine-{kafka_jars.KAFKA_VERSION}"
    compiled = folder / f"{_CLASS}.class"
    if compiled.exists() and compiled.stat().st_mtime >= _SOURCE.stat().st_mtime:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = ["javac", "--release", "17", "-cp", jars, "-d", temporary, str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{_SOURCE.name} does not compile: {done.stderr[-2000:]}")
        classes = sorted(Path(temporary).iterdir(), key=lambda path: path.name == compiled.name)
        for path in classes:  # the one that is looked for comes last: then all are there
            os.replace(path, folder / path.name)
    return folder
