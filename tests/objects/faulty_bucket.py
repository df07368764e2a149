"""An object store in memory that records its requests, and whose requests fail in every way, by a seed.

    before              refused; nothing happened
    after               done, and the answer was lost
    cut                 the connection was closed half way: a delete is done in part, a get has returned a part
    late                no answer comes; it takes effect later, after any number of other requests
    doubled             done, and repeated later
    refused though done a put that the client's library sends twice: the second finds the first
    slow there, back    time passes, and other requests come, before or after it is done
    death before, after the sender dies

Late requests arrive in another order than they were sent in. They may outlive their sender, and arrive after other
processes have taken its place.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from logs import FakeClock

from segmentlog.errors import ObjectStoreError
from segmentlog.format.manifest import MANIFEST_KEY, Manifest, ShippedPartition, Tail, decode_manifest
from segmentlog.objects.bucket.base import Data, ObjectInfo, ObjectMissing, PreconditionFailed
from segmentlog.testing.fault_injection import Died

READ_FAULTS = ("before", "cut", "slow there", "slow back", "death before", "death after")
WRITE_FAULTS = ("before", "after", "cut", "late", "doubled", "slow there", "slow back", "death before", "death after")
SWAP_FAULTS = (*WRITE_FAULTS, "refused though done")
FAULTS = SWAP_FAULTS

_DELAYS_MS = (20, 100, 1_000, 40_000)
_LATE_MAX = 80
"""A late request arrives before this many others were made."""

Note = Callable[..., None]


class Shelf:
    """The objects in the store, and late requests. ``note`` records events, see `shipping_checker`."""

    def __init__(self, clock: FakeClock, note: Note) -> None:
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.modified_ms: dict[str, int] = {}
        self.clock = clock
        self._note = note
        self._number = 0
        self._late: list[tuple[int, Callable[[], object]]] = []
        self._requests = 0
        self._hashes: dict[str, str] = {}
        self._needed: tuple[str, set[str]] = "", set()

    def put(self, who: str, key: str, data: bytes) -> str:
        """Put it; its tag."""
        self._number += 1
        digest = hashlib.sha256(data).hexdigest()[:16]
        self.objects[key] = (data, str(self._number))
        self.modified_ms[key] = self.clock.now_ms()
        if key != MANIFEST_KEY:
            self._note("put", who, key, digest)
        return str(self._number)

    def compare_and_swap(self, who: str, key: str, data: bytes, tag: str | None) -> str | None:
        """Put the object if the tag is still the given one; otherwise return None."""
        if self.objects.get(key, (b"", None))[1] != tag:
            return None
        now = self.put(who, key, data)
        manifest = decode_manifest(data)
        self._note(
            "manifest", who, self.clock.now_ms(), manifest.nonce, manifest.owner.epoch, self._described(manifest),
            sorted(stored.key for stored in manifest.objects()),
            {one.key: one.since_ms for one in manifest.condemned}, manifest.is_handed_over,
        )  # fmt: skip
        return now

    def owner_epoch(self) -> int:
        """Return the epoch of the owner in the manifest, or 0."""
        found = self.objects.get(MANIFEST_KEY)
        return 0 if found is None else decode_manifest(found[0]).owner.epoch

    def is_handed_over(self) -> bool:
        """Return whether the owner waits for another machine to take over."""
        found = self.objects.get(MANIFEST_KEY)
        return found is not None and decode_manifest(found[0]).is_handed_over

    def needed(self) -> set[str]:
        """Return the objects that exist and that the manifest refers to."""
        found = self.objects.get(MANIFEST_KEY)
        if found is None:
            return set()
        if self._needed[0] != found[1]:
            self._needed = found[1], {stored.key for stored in decode_manifest(found[0]).objects()}
        return self._needed[1] & self.objects.keys()

    def delete(self, who: str, keys: Iterable[str]) -> str:
        """Remove what is there of them."""
        gone = [key for key in keys if self.objects.pop(key, None) is not None]
        if gone:
            self._note("deleted", who, self.clock.now_ms(), gone)
        return "done"

    def postpone(self, rng: random.Random, do: Callable[[], object]) -> None:
        """Have it done after a while."""
        self._late.append((self._requests + rng.choice((1, 3, 10, _LATE_MAX)), do))

    def arrive(self, rng: random.Random, seen: Counter[str], *, everything: bool = False) -> None:
        """Do what was postponed for long enough."""
        self._requests += 1
        due = [one for one in self._late if everything or one[0] <= self._requests]
        rng.shuffle(due)
        self._late = [one for one in self._late if one not in due]
        for _, do in due:
            seen["late arrivals"] += 1
            do()

    def _described(self, manifest: Manifest) -> dict[str, Any]:
        tails = {tail.number: self._tail(tail) for tail in manifest.tails}
        return {
            f"{topic.id}/{partition.number}": {
                "start": partition.log_start_offset, "end": partition.end_offset, "ceiling": partition.offset_grant,
                "segments": self._segments(partition, tails),
            }
            for topic in manifest.topics for partition in topic.partitions
        }  # fmt: skip

    def _segments(self, partition: ShippedPartition, tails: dict[int, bytes]) -> dict[str, tuple[int, str]]:
        """Return size and digest of the segment files that a restore must have; a missing object leaves no file."""
        files: dict[int, list[bytes]] = {partition.active_base: []}
        for segment in partition.segments:
            files[segment.base_offset] = [self._bytes(stored.key) for stored in segment.log.objects]
        for chunk in partition.chunks:
            data = tails[chunk.tail][chunk.start : chunk.start + chunk.size_bytes]
            files.setdefault(chunk.segment, []).append(data)
        joined = {base: b"".join(parts) for base, parts in files.items()}
        return {str(base): (len(data), hashlib.sha256(data).hexdigest()[:16]) for base, data in joined.items()}

    def _tail(self, tail: Tail) -> bytes:
        return tail.data if tail.object is None else self._bytes(tail.object.key)

    def _bytes(self, key: str) -> bytes:
        return self.objects.get(key, (b"it is gone", ""))[0]


class FaultyBucket:
    """A `Bucket` onto a shelf, for one process.

    ``meanwhile`` is what others do while a request is under way; ``calm``: no request fails; ``dead``: none is made;
    ``is_cut_off``: none arrives.
    """

    def __init__(
        self,
        who: str,
        shelf: Shelf,
        rng: random.Random,
        seen: Counter[str],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self.url = "memory://bucket"
        self.calm = self.dead = self.is_cut_off = False
        self.rate = rng.choice((0.03, 0.1, 0.2))
        self._who = who
        self.shelf = shelf
        self._rng = rng
        self._seen = seen
        self._meanwhile = meanwhile

    def get(self, key: str) -> tuple[bytes, str]:
        found: list[tuple[bytes, str]] = []
        self._request(key, READ_FAULTS, lambda: found.append(self._there(key)))
        return found[0]

    def get_range(self, key: str, start: int, size_bytes: int) -> bytes:
        found: list[bytes] = []
        self._request(key, READ_FAULTS, lambda: found.append(self._there(key)[0][start : start + size_bytes]))
        if len(found[0]) != size_bytes:
            raise ObjectStoreError(self.url, key, f"it ends {size_bytes - len(found[0])} bytes too early", False)
        return found[0]

    def _there(self, key: str) -> tuple[bytes, str]:
        if key not in self.shelf.objects:
            raise ObjectMissing(self.url, key)
        return self.shelf.objects[key]

    def put(self, key: str, data: Data) -> None:
        copy = bytes(data)
        self._request(key, WRITE_FAULTS, lambda: self.shelf.put(self._who, key, copy))

    def compare_and_swap(self, key: str, data: Data, tag: str | None) -> str:
        copy = bytes(data)
        result = self._request(key, SWAP_FAULTS, lambda: self.shelf.compare_and_swap(self._who, key, copy, tag))
        if result is None:
            raise PreconditionFailed(self.url, key)
        return str(result)

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        half = wanted[: self._rng.randrange(len(wanted) + 1)]
        self._request(
            "delete", WRITE_FAULTS, lambda: self.shelf.delete(self._who, wanted),
            lambda: self.shelf.delete(self._who, half),
        )  # fmt: skip

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        found: list[ObjectInfo] = []

        def look() -> None:
            for key, (data, _) in sorted(self.shelf.objects.items()):
                if key.startswith(prefix):
                    found.append(ObjectInfo(key, len(data), self.shelf.modified_ms[key]))

        self._request("list", READ_FAULTS, look)
        return iter(found)

    # ------------------------------------------------------------ what becomes of a request

    def _request(
        self, what: str, faults: tuple[str, ...], do: Callable[[], object], half: Callable[[], object] = lambda: None
    ) -> object:
        """Make a request and return its result, which is None for a refused swap."""
        if self.dead:
            raise Died
        if self.is_cut_off and not self.calm:
            raise ObjectStoreError(self.url, what, "cannot connect")
        self.shelf.arrive(self._rng, self._seen)
        fault = "" if self.calm or self._rng.random() >= self.rate else self._rng.choice(faults)
        if not fault:
            return do()
        self._seen[fault] += 1
        if fault == "death before":
            self.die()
        if fault == "before":
            raise ObjectStoreError(self.url, what, "503: slow down")
        if fault == "cut":
            half()
            raise ObjectStoreError(self.url, what, "the connection was closed")
        if fault == "late":
            self.shelf.postpone(self._rng, do)
            raise ObjectStoreError(self.url, what, "no answer in time")
        if fault == "slow there":
            self._wait()
        result = do()
        if fault == "slow back":
            self._wait()
        if fault == "doubled":
            self.shelf.postpone(self._rng, do)
        if fault == "death after":
            self.die()
        if fault == "after":
            raise ObjectStoreError(self.url, what, "the connection was closed, once it was done")
        return None if fault == "refused though done" else result

    def _wait(self) -> None:
        self.shelf.clock.advance(self._rng.choice(_DELAYS_MS))
        self._meanwhile()
        if self.dead:
            raise Died

    def die(self) -> None:
        """Kill the sender of this bucket's requests."""
        self.dead = True
        raise Died
