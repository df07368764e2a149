"""A limit on the uploaded bytes per second, and the progress that is reported meanwhile."""

from __future__ import annotations

import time
from pathlib import Path

import objects.buckets  # noqa: F401  (it starts obstore's threads)
import pytest

from segmentlog.errors import InvalidConfig
from segmentlog.objects.bucket import cloud_bucket
from segmentlog.objects.bucket.cloud_bucket import CloudBucket
from segmentlog.objects.bucket.local_bucket import LocalBucket
from segmentlog.objects.bucket.rate_limit import RateLimiter
from segmentlog.objects.restore.restore import restore
from segmentlog.store import LogStore


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of requested sleeps; none of them takes time."""
    times: list[float] = []
    monkeypatch.setattr("segmentlog.objects.bucket.rate_limit.time.sleep", times.append)
    return times


def test_it_takes_as_long_as_the_bytes_do(slept: list[float]) -> None:
    """Only the first bytes come without a wait."""
    pace = RateLimiter(1000)
    pace.wait(200)
    pace.wait(5000)
    assert sum(slept) == pytest.approx(5, abs=0.1)
    assert pace.is_limited
    slept.clear()
    RateLimiter().wait(10**12)
    assert not any(slept)
    assert not RateLimiter().is_limited


@pytest.mark.parametrize("size_bytes", [0, 1, 100_000, 1_000_000])
def test_an_object_is_the_same_at_any_pace(
    slept: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size_bytes: int
) -> None:
    """This holds for one request and for parts."""
    monkeypatch.setattr(cloud_bucket, "_PART_BYTES", 300_000)
    monkeypatch.setattr(cloud_bucket, "_PUT_BYTES", 300_000)
    data = bytes(range(256)) * (size_bytes // 256) + b"x" * (size_bytes % 256)
    for bucket in (
        CloudBucket("memory:///", limiter=RateLimiter(1 << 20)),
        LocalBucket(str(tmp_path / "place"), limiter=RateLimiter(1 << 20)),
    ):
        bucket.put("a/b", memoryview(data))
        assert bucket.get("a/b")[0] == data
    assert sum(slept) >= (2 * size_bytes - 3 * (1 << 20)) / (1 << 20)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "1MiB", True])
def test_no_limit_that_is_none(tmp_path: Path, wrong: object) -> None:
    """An invalid limit is refused before any upload."""
    with (
        LogStore(tmp_path / "store", background=False) as store,
        pytest.raises(InvalidConfig, match="ship_bytes_per_s"),
    ):
        store.ship(f"file://{tmp_path}/bucket", bytes_per_s=wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "bucket").exists()


def test_a_store_is_shipped_no_faster(tmp_path: Path) -> None:
    """The progress is reported up to the end."""
    told: list[tuple[int, int]] = []
    with LogStore(tmp_path / "store", background=False) as store:
        log = store.create_topic("t", segment_records=1, compression_type="none", fsync="always").partition(0)
        for number in range(9):
            log.append([b"%d" % number * 50_000])
        size_bytes = sum(segment.size_bytes for segment in log.segments())
        began_s = time.monotonic()
        store.ship(
            f"file://{tmp_path}/bucket", bytes_per_s=1 << 20,
            progress=lambda done, whole: told.append((done, whole)),
        )  # fmt: skip
        assert time.monotonic() - began_s > (size_bytes - (1 << 18)) / (1 << 20)
    assert all(done <= whole for done, whole in told)
    assert told == sorted(told, key=lambda pair: pair[0])
    assert told[-1][0] == told[-1][1] >= size_bytes
    assert restore(LocalBucket(f"{tmp_path}/bucket"), str(tmp_path / "restored")).size_bytes == size_bytes
