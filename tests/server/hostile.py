"""Requests that nearly make sense: of every API in every version, about existing and missing objects of a store.

`Asker.request` fills the fields that the schemas of a version have with names, numbers and batches of a small world.
Answers of every kind come: success, and each possible error. `mutated` returns the bytes of a broken or hostile client:
cut, doubled, or with absurd sizes.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from random import Random
from typing import Any, Final

from codec_samples import MESSAGES
from wire import CODECS, NOW_MS, Sent, foreign, forged

from segmentlog.server.api_table import SERVED
from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.layouts import FieldLayout, StructLayout

TOPICS: Final = ("t", "compacted", "library")
"""Which a store has for it, with two partitions each."""
_NAMES: Final = (*TOPICS, *TOPICS, "new", "nowhere", "__group_offsets", "", ".", "../x", "a" * 250, "grüße", "t\0", "*")
_GROUPS: Final = ("g", "g", "h", "", "other", "g" * 300, "../g")
_NUMBERS: Final = (0, 0, 0, 1, 1, 2, -1, -1, -2, 3, 7)
_EXTREMES: Final = {"int8": 7, "int16": 15, "int32": 31, "int64": 63}
_KEYS: Final = ("retention.ms", "cleanup.policy", "flush.ms", "flush.messages", "compression.type", "no.such", "fsync")
OLD_ID: Final = 1 << 61 | 5
"""A producer id as an earlier version assigned it: accepted where the partition knows it."""
_VALUES: Final = ("1", "delete", "compact", "compact,delete", "x", "", "-1", "1000", "lz4", "producer", "always")
_SHORT_MS: Final = (0, 1, 10, 30)
"""Fetches in these tests wait only briefly."""


def every_api() -> list[tuple[int, int]]:
    """(key, version) of all that is served."""
    return [(key, version) for key in SERVED for version in range(APIS[key].min_version, APIS[key].max_version + 1)]


def batch(random: Random, *, honest: bool = False) -> bytes | None:
    """Return a batch as a client sends it; one in three is wrong somewhere, one in ten is not a batch."""
    records = [
        Sent(random.choice((b"k1", b"k2", None)), random.choice((b"", None, random.randbytes(20))), NOW_MS + index)
        for index in range(random.randint(1, 4))
    ]
    if honest:
        records = [Sent(one.key or b"k", one.value) for one in records]
    numbered = random.choice((OLD_ID, 3)), 0, random.randrange(3)
    producer = random.choice(((-1, -1, -1), numbered))
    made = foreign(records, random.choice(tuple(CODECS.values())), producer=(-1, -1, -1) if honest else producer)
    if honest or random.random() < 0.6:
        return made
    if random.random() < 0.3:
        return random.choice((b"", None, random.randbytes(30), made[: random.randrange(len(made))], made + made))
    return lying(random, made)


def lying(random: Random, made: bytes) -> bytes:
    """Return the batch with something else in it than it says, its checksum mostly right."""
    if random.random() < 0.5:
        return forged(made, crc=random.random() < 0.9, **{_field_of(random): _lie(random)})
    body = bytearray(made)
    for _ in range(random.randint(1, 3)):
        body[random.randrange(61, len(body))] = random.choice((0, 1, 127, 128, 255))
    return forged(bytes(body))


def _field_of(random: Random) -> str:
    from segmentlog.format.wire import WireHeader

    return random.choice([name for name in WireHeader._fields if "crc" not in name])


def _lie(random: Random) -> int:
    return random.choice((0, 1, 2, -1, 127, random.randrange(128)))


class Asker:
    """Makes requests about a store; ``ids`` are those of its topics."""

    def __init__(self, random: Random, ids: Sequence[str], *, extreme: float = 0.02) -> None:
        self.random = random
        self.ids = [uuid.UUID(text).bytes for text in ids]
        self.members = [""]
        self._extreme = extreme

    def request(self, key: int, version: int, most: int = 3) -> Any:
        """Return a request of this API and version."""
        made = self._struct(key, MESSAGES[f"{APIS[key].name}Request"].struct, version, most)
        if key == 11 and self.random.random() < 0.8:
            made.protocol_type = "consumer"
        return made

    def _struct(self, key: int, struct: StructLayout, version: int, most: int) -> Any:
        values = {
            field.name: self._field(key, field, version, most) for field in struct.fields if version in field.versions
        }
        return getattr(APIS[key].codec, struct.name)(**values)

    def _field(self, key: int, field: FieldLayout, version: int, most: int) -> Any:
        if version in field.nullable and self.random.random() < 0.15:
            return None
        if field.stands_for_default:
            return None
        if not field.is_array:
            return self._one(key, field, version, most)
        return [self._one(key, field, version, most) for _ in range(self.random.randint(0, most))]

    def _one(self, key: int, field: FieldLayout, version: int, most: int) -> Any:
        random, name = self.random, field.name
        if field.struct is not None:
            return self._struct(key, field.struct, version, most)
        if field.kind in _EXTREMES:
            return self._number(name, _EXTREMES[field.kind])
        if field.kind == "bool":
            return random.random() < 0.5
        if field.kind == "uuid":
            return random.choice((*self.ids, *self.ids, bytes(16), random.randbytes(16)))
        if field.kind == "string":
            return self._text(name)
        if field.kind == "records":
            return batch(random)
        return random.choice((b"", b"\0\0", random.randbytes(20)))

    def _number(self, name: str, bits: int) -> int:
        random = self.random
        if name.endswith("_ms") or name == "timeout_ms":
            return random.choice(_SHORT_MS)
        if random.random() < self._extreme:
            return random.choice((2**bits - 1, -(2**bits), random.randint(-(2**bits), 2**bits - 1)))
        if name == "acks":
            return random.choice((-1, 1, 1, 0, 2))
        if name in ("max_bytes", "partition_max_bytes"):
            return random.choice((0, 1, 1000, 1 << 20))
        if name in ("num_partitions", "count"):
            return random.choice((-1, 0, 1, 2, 3))
        if name == "replication_factor":
            return random.choice((-1, 1, 1, 2))
        if "type" in name:
            return random.choice((0, 1, 2, 2, 2, 3, 4, 5))
        return random.choice(_NUMBERS)

    def _text(self, name: str) -> str:
        random = self.random
        if "member_id" in name:
            return random.choice(self.members[-5:])
        if "instance" in name:
            return random.choice(("", "i1", "i2"))
        if "group" in name or "key" in name:
            return random.choice(_GROUPS + (_KEYS if "key" in name else ()))
        if "protocol" in name:
            return random.choice(("consumer", "range", ""))
        if name == "value":
            return random.choice(_VALUES)
        if name == "name":
            return random.choice(_NAMES + _KEYS)
        return random.choice(_NAMES)


def mutated(random: Random, frame: bytes) -> bytes:
    """Return the same bytes, but for a few."""
    made = bytearray(frame)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(made) + 1)
        match random.randrange(6):
            case 0:
                made[at : at + 1] = bytes((random.choice((0, 1, 127, 128, 255)),))
            case 1:
                made[at : at + 4] = random.choice((b"\x7f\xff\xff\xff", b"\xff\xff\xff\xfe", b"\0\x0f\xff\xff"))
            case 2:
                del made[at : at + random.randint(1, 9)]
            case 3:
                made[at:at] = made[max(at - 9, 0) : at]
            case 4:
                del made[at:]
            case 5:
                made[at : at + 2] = random.randbytes(2)
    return bytes(made)
