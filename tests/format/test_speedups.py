"""The core gives the same answers compiled, interpreted and by numpy, whatever the bytes; and stays within them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from core_batches import Payload, random_columns, random_deltas, random_payload
from cores import INTERPRETED, WAYS, build_core, found_by, need_compiler, use_way
from hypothesis import given
from hypothesis import strategies as st
from seeds import every_seed, seeds
from wire import NOW_MS, Sent, foreign, read_foreign, sent

from segmentlog.format import wire_encode
from segmentlog.format.batch import WIRE_HEADER_SIZE
from segmentlog.format.columns import MalformedColumn, decode_blobs, decode_headers
from segmentlog.format.wire_records import MalformedRecord
from segmentlog.speedups import COMPILED, records

BATCHES = int(os.environ.get("SEGMENTLOG_SANITIZED_BATCHES", "30000"))
"""Mutated batches that go through the core with sanitizers; CI takes 100,000, and `make test-crash` ten million."""
ROUNDS = 1500
"""Payloads of each seed. They take a second."""
OTHER_WAYS = [way for way in WAYS if way != "interpreted"]


def seen(way: str, payload: Payload) -> Any:
    """Return everything that can be read of the records, or the error."""
    try:
        found = found_by(way, *payload)
    except MalformedRecord as error:
        return error.index, error.reason
    odd = np.arange(found.count) % 2 == 1
    return (
        found.keys(), found.values(), found.headers(), found.offset_deltas.tolist(), found.timestamp_deltas.tolist(),
        found.timestamp_delta_range, found.any_key, found.any_null_value, found.any_headers,
        found.null_keys().tolist(), found.kept(None), found.kept(odd), found.kept(odd, 7), found.kept(None, -1000),
    )  # fmt: skip


def padded(payload: Payload) -> Payload:
    """Numpy needs the zeros that decompression leaves after the records."""
    return payload._replace(data=payload.data[: payload.size] + bytes(16))


@pytest.mark.parametrize("way", OTHER_WAYS)
@pytest.mark.parametrize("seed", seeds("cores"))
def test_every_way_reads_the_same(way: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Valid, mutated and random records give the same columns or the same refusal, in every way."""
    use_way(way, monkeypatch)
    rng = Random(seed)
    accepted = 0
    for _ in range(ROUNDS // 3):
        payload = padded(random_payload(rng))
        expected = seen("interpreted", payload)
        assert seen(way, payload) == expected, payload
        accepted += len(expected) > 2
    assert ROUNDS // 12 < accepted < ROUNDS // 3 - ROUNDS // 12


@pytest.mark.parametrize("way", OTHER_WAYS)
@given(raw=st.binary(max_size=80), count=st.integers(0, 5), last=st.integers(-1, 6))
def test_every_way_reads_the_same_noise(way: str, raw: bytes, count: int, last: int) -> None:
    """Hypothesis finds no difference, either."""
    if way == "compiled" and not COMPILED:
        need_compiler()
    payload = Payload(raw + bytes(16), len(raw), count, last)
    assert seen(way, payload) == seen("interpreted", payload)


@pytest.mark.parametrize("way", WAYS)
@given(records=sent())
def test_every_way_reads_what_clients_send(way: str, records: list[Sent]) -> None:
    """Batches of another implementation are read as it reads them."""
    if way == "compiled" and not COMPILED:
        need_compiler()
    data = foreign(records)
    raw = data[WIRE_HEADER_SIZE:]
    found = found_by(way, raw + bytes(16), len(raw), len(records), len(records) - 1)
    theirs = [one for _, one in read_foreign(data)]
    assert found.keys() == [one.key for one in theirs]
    assert found.values() == [one.value for one in theirs]
    assert found.headers() == [one.headers for one in theirs]
    assert found.kept(None) == raw


def scanned(core: ModuleType, payload: Payload) -> tuple[Any, list[list[int]] | None]:
    """Return what the scan says, and its table where it accepts the records."""
    table = np.full((core.ROW_COUNT, payload.count), -7, np.int64)
    said = core.scan_records(*payload, table)
    assert core.scan_records(*payload, None) == said
    return said, table.tolist() if said[0] == 0 else None


def encoded(core: ModuleType, columns: Any, timestamps: list[int], offsets: list[int]) -> Any:
    """Return the records, or the error."""
    try:
        return bytes(core.encode_columns(*columns, np.array(timestamps, np.int64), np.array(offsets, np.int64)))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("seed", seeds("cores"))
def test_compiled_and_interpreted_functions_agree(seed: int) -> None:
    """The functions themselves return the same, to the last number, and raise the same."""
    need_compiler()
    rng = Random(seed)
    for _ in range(ROUNDS):
        payload = random_payload(rng)
        assert scanned(records, payload) == scanned(INTERPRETED, payload), payload
        columns = random_columns(rng)
        deltas = random_deltas(rng, columns.count)
        assert encoded(records, columns, *deltas) == encoded(INTERPRETED, columns, *deltas), (columns, deltas)


@pytest.mark.parametrize("seed", seeds("cores"))
def test_columns_are_encoded_as_numpy_does_and_read_back(seed: int) -> None:
    """Columns that decode are encoded, byte for byte as numpy encodes them; those that do not are refused."""
    rng = Random(seed)
    encoded_count = 0
    for _ in range(ROUNDS):
        columns = random_columns(rng)
        timestamps, offsets = list(range(columns.count)), list(range(columns.count))
        made = encoded(records, columns, timestamps, offsets)
        try:
            keys = decode_blobs(memoryview(columns.keys), columns.count) if columns.keys else None
            values = decode_blobs(memoryview(columns.values), columns.count)
            headers = decode_headers(memoryview(columns.headers), columns.count) if columns.headers else None
        except MalformedColumn:
            if isinstance(made, bytes):  # only names that are not UTF-8 are let through
                msgspec.msgpack.decode(columns.values, type=list[bytes | None])
                with pytest.raises(UnicodeDecodeError):
                    columns.headers.decode()
            continue
        assert isinstance(made, bytes), made
        encoded_count += 1
        if columns.count:
            deltas = np.array(timestamps, np.int64), np.array(offsets, np.int64)
            assert made == wire_encode.encode_records(keys, values, headers, *deltas)
    assert encoded_count > ROUNDS // 3


@pytest.mark.parametrize("core", [pytest.param(INTERPRETED, id="interpreted"), pytest.param(records, id="installed")])
def test_wrong_arguments_are_refused(core: ModuleType) -> None:
    """A caller's mistake is an IndexError or a TypeError, never a read or a write beyond the end."""
    data, numbers = foreign([Sent(b"k", b"v", NOW_MS, (("h", b"x"),))])[WIRE_HEADER_SIZE:], np.arange(3)
    table = np.zeros((core.ROW_COUNT, 1), np.int64)
    assert core.scan_records(data, len(data), 1, 0, table)[0] == 0
    small, narrow = np.zeros((core.ROW_COUNT - 1, 1), np.int64), np.zeros((core.ROW_COUNT, 0), np.int64)
    for arguments in [(data, len(data) + 1, 1, 0, table), (data, len(data), -1, 0, table),
                      (data, len(data), 1, 0, small), (data, len(data), 1, 0, narrow)]:  # fmt: skip
        with pytest.raises(IndexError):
            core.scan_records(*arguments)
    for arguments in [(data, table, core.KEY, 0, 2), (data, table, core.KEY, -1, 1), (data, table, core.END, 0, 1),
                      (data, table, -1, 0, 1), (data[:7], table, core.VALUE, 0, 1),
                      (data, None, core.KEY, 0, 1)]:  # fmt: skip
        with pytest.raises(IndexError):
            core.cut_field(*arguments)
    for arguments in [(data, table, 0, 2), (data, table, -1, 1), (data, small, 0, 1), (data[:-1], table, 0, 1),
                      (data, None, 0, 1)]:  # fmt: skip
        with pytest.raises(IndexError):
            core.cut_headers(*arguments)
    forged = table.copy()
    for row, number in [(core.HEADERS, -1), (core.HEADERS, 2**62), (core.HEADER_COUNT, 2**62)]:
        forged[:] = table
        forged[row, 0] = number
        with pytest.raises(IndexError):
            core.cut_headers(data, forged, 0, 1)
    for start, size in [(-1, 1), (2**62, 1), (0, 2**62), (len(data), 1)]:
        forged[core.KEY, 0], forged[core.KEY_SIZE, 0] = start, size
        with pytest.raises(IndexError):
            core.cut_field(data, forged, core.KEY, 0, 1)
    column = b"\x93\xc0\xc0\xc0"
    for arguments in [(b"", column, b"", 3, numbers[:2], numbers), (b"", column, b"", 3, numbers, numbers[:2]),
                      (b"", column, b"", -1, numbers, numbers)]:  # fmt: skip
        with pytest.raises(IndexError):
            core.encode_columns(*arguments)
    with pytest.raises(TypeError):
        core.scan_records(None, 0, 0, 0, None)
    with pytest.raises(TypeError):
        core.encode_columns(None, column, b"", 3, numbers, numbers)


# ---------------------------------------------------------------- with sanitizers


def sanitized(library: Path, seed: int, count: int, options: str = "") -> subprocess.CompletedProcess[str]:
    """Return the end of a process that ran mutated batches through that library."""
    runtime = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": f"detect_leaks=0{options}",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # each object is an allocation of its own, with room to be caught beyond it
    }
    script = Path(__file__).parents[1] / "sanitized_core.py"
    command = [sys.executable, "-I", script, library, str(seed), str(count)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


SANITIZERS = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"


@pytest.mark.long(minutes=0.7)
def test_mutated_batches_under_sanitizers(tmp_path: Path) -> None:
    """The core reads and writes within its buffers, and does nothing undefined, whatever the batch."""
    need_compiler()
    library = build_core(tmp_path, CFLAGS=SANITIZERS, LDFLAGS=SANITIZERS)
    for seed in every_seed("cores"):
        done = sanitized(library, seed, BATCHES // 2)
        assert done.returncode == 0, f"SEGMENTLOG_SEED={seed}\n{done.stderr[-6000:]}"
        accepted, encoded_count = map(int, done.stdout.split())
        assert accepted > BATCHES // 20
        assert encoded_count > BATCHES // 10


@pytest.mark.long(minutes=0.7)
def test_sanitizers_find_a_missing_check(tmp_path: Path) -> None:
    """If a check is removed from the source, the same batches end the process, so the test above is effective."""
    need_compiler()
    check = "length > size - body"
    library = build_core(tmp_path, change=(check, "length > 2 * size"), CFLAGS=SANITIZERS, LDFLAGS=SANITIZERS)
    done = sanitized(library, 1, 5000, ":symbolize=0")
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr


# ---------------------------------------------------------------- building


@pytest.mark.long
def test_without_a_compiler_the_core_is_interpreted(tmp_path: Path) -> None:
    """An install succeeds with a compiler that fails or is missing, and deletes an older library beside the source."""
    for compiler in ("/bin/false", "/nowhere/gcc"):
        folder = tmp_path / Path(compiler).name
        old = folder / "segmentlog" / "speedups" / f"records{_suffix()}"
        with pytest.raises(FileNotFoundError):
            build_core(folder, before=lambda old=old: old.write_bytes(b"old"), CC=compiler)
        assert not old.exists()


def _suffix() -> str:
    import sysconfig

    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def big_calls(core: ModuleType) -> dict[str, Callable[[], object]]:
    """Return calls of the core's loops for a batch of very many records of the smallest size."""
    count = 200_000
    deltas = np.arange(count)
    columns = b"\xdd" + count.to_bytes(4, "big") + b"\xc0" * count
    data = bytes(core.encode_columns(columns, columns, b"", count, deltas, deltas))
    table = np.empty((core.ROW_COUNT, count), np.int64)
    assert core.scan_records(data, len(data), count, count, table)[0] == 0
    return {
        "scan": lambda: core.scan_records(data, len(data), count, count, None),
        "cut": lambda: core.cut_field(data, table, core.VALUE, 0, count),
        "headers": lambda: core.cut_headers(data, table, 0, count),
        "encode": lambda: core.encode_columns(columns, columns, b"", count, deltas, deltas),
    }


@pytest.mark.parametrize("name", ["scan", "cut", "headers", "encode"])
def test_other_threads_run_during_a_loop_over_many_records(name: str) -> None:
    """A thread without the GIL gets it during the call: no other place of this test gives it up."""
    need_compiler()
    call = big_calls(records)[name]
    turns, done = [0], threading.Event()

    def take_turns() -> None:
        while not done.wait(0.0001):
            turns[0] += 1

    thread = threading.Thread(target=take_turns)
    interval_s = sys.getswitchinterval()
    deadline_s = time.monotonic() + 30
    # With so long an interval no thread has to give the GIL up: it changes hands only where a thread waits.
    sys.setswitchinterval(1e6)
    try:
        thread.start()
        during = 0
        while not during and time.monotonic() < deadline_s:
            before = turns[0]
            call()
            during = turns[0] - before
    finally:
        sys.setswitchinterval(interval_s)
        done.set()
        thread.join()
    assert during


def test_array_is_what_the_core_takes() -> None:
    """Deltas may be any buffer of int64: an array of the standard library, and a numpy array that is read-only."""
    frozen = np.arange(2)
    frozen.flags.writeable = False
    made = records.encode_columns(b"", b"\x92\xc0\xc0", b"", 2, array("q", [0, 1]), frozen)
    assert bytes(made) == bytes(records.encode_columns(b"", b"\x92\xc0\xc0", b"", 2, np.arange(2), np.arange(2)))
