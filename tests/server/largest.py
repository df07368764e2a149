"""Requests that ask for as much as possible: of every API and version, made from the codec's schemas.

`shapes` has shapes for each array of a request: the array is filled with copies of one element, or with elements that
differ in one field alone. Everything else has a value that the small world of `test_costs` knows: an existing topic
with many partitions, a group with positions in all of them, a transactional id, rules.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from codec_samples import MESSAGES
from wire import NOW_MS, Sent, foreign

from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.layouts import FieldLayout, StructLayout

TOPIC: Final = "big"
SPARE: Final = "spare"
GROUP: Final = "g"
TRANSACTION: Final = "tx"
STRING_MAX: Final = "x" * 32_767
_BATCH: Final = foreign([Sent(b"k", b"v", NOW_MS)])
_INTS: Final = ("int8", "int16", "int32", "int64")
_BITS: Final = {"int8": 7, "int16": 15, "int32": 31, "int64": 63}

_STRINGS: Final = {
    "topic": TOPIC, "subscribed_topic_names": TOPIC, "group_id": GROUP, "groups": GROUP, "group_ids": GROUP,
    "groups_names": "no-group", "coordinator_keys": GROUP, "key": GROUP, "transactional_id": TRANSACTION,
    "transactional_ids": TRANSACTION, "v3_and_below_transactional_id": TRANSACTION, "resource_name": TOPIC,
    "protocol_type": "consumer", "principal": "User:ann", "host": "*", "states_filter": "Stable",
    "types_filter": "classic", "state_filters": "Ongoing", "configuration_keys": "retention.ms", "value": "1000",
    "mechanism": "PLAIN", "client_software_name": "test", "client_software_version": "1", "topic_name": "",
    "resource_name_filter": TOPIC,
}  # fmt: skip
"""By field; a field that is not here is null where that may be, or empty."""
_NUMBERS: Final = {
    "acks": 1, "max_bytes": 1 << 20, "partition_max_bytes": 1 << 20, "session_epoch": -1, "current_leader_epoch": -1,
    "last_fetched_epoch": -1, "replica_id": -1, "timestamp": NOW_MS + 1, "generation_id": -1, "member_epoch": -1,
    "generation_id_or_member_epoch": -1, "committed_leader_epoch": -1, "rebalance_timeout_ms": 50,
    "session_timeout_ms": 50, "num_partitions": 1, "replication_factor": 1, "transaction_timeout_ms": 1000,
    "producer_id": -1, "producer_epoch": -1, "resource_type_filter": 1, "pattern_type_filter": 2,
    "resource_pattern_type": 3, "permission_type": 3, "operation": 3, "resource_type": 2, "count": 1,
    "endpoint_type": 1, "response_partition_limit": 2000, "duration_filter": -1, "broker_ids": 1,
}  # fmt: skip


class Shape(NamedTuple):
    """One way to fill a request. ``make`` takes the number of elements of the array that is filled."""

    key: int
    version: int
    name: str
    base: Any
    path: tuple[str, ...]
    field: FieldLayout
    varied: str | None

    def __str__(self) -> str:
        return f"{APIS[self.key].name} v{self.version}: {self.name}"

    def make(self, count: int) -> Any:
        """Return a request whose array has ``count`` elements."""
        request = copy.deepcopy(self.base)
        holder = request
        for name in self.path[:-1]:
            holder = getattr(holder, name)
            holder = holder[0] if isinstance(holder, list) else holder
        (one,) = getattr(holder, self.path[-1])
        elements = [one] * count
        if self.varied is not None:
            for number in range(1, count):
                elements[number] = self._varied(one, number)
        setattr(holder, self.path[-1], elements)
        return request

    def _varied(self, one: Any, number: int) -> Any:
        struct = self.field.struct
        if struct is None:
            return _another(self.field, number)
        field = next(each for each in struct.fields if each.name == self.varied)
        changed = copy.copy(one)
        setattr(changed, field.name, _another(field, number))
        return changed


def _another(field: FieldLayout, number: int) -> Any:
    if field.kind == "string":
        return f"{number:x}"
    if field.kind == "uuid":
        return (1 << 100 | number).to_bytes(16, "big")
    return number % 2 ** _BITS[field.kind]


_OTHERWISE: Final[dict[int, list[dict[str, Any]]]] = {
    2: [{}, {"timestamp": -3}],
    32: [{}, {"resource_type": 4, "resource_name": "1"}, {"resource_type": 32, "resource_name": GROUP}],
    33: [{}, {"resource_type": 32, "resource_name": GROUP}],
    44: [{}, {"resource_type": 32, "resource_name": GROUP}],
}
"""By API: other values of fields, with which the same request asks for something else."""


def shapes(key: int, version: int, topic_id: bytes) -> Iterator[Shape]:
    """Yield every shape of an API in a version. Some nullable arrays are null, which asks for everything."""
    module, struct = APIS[key].codec, MESSAGES[f"{APIS[key].name}Request"].struct
    for (nulls, long), otherwise in itertools.product(
        ((False, False), (True, False), (False, True)), _OTHERWISE.get(key, [{}])
    ):
        made = _Maker(module, key, version, topic_id, nulls, long=long, otherwise=otherwise)
        base = made.struct(struct)
        if nulls and not made.has_nulls:
            continue
        for path, field in _arrays(struct, version, base):
            if long and (field.kind == "string" or _has_texts(field.struct)):
                continue  # the request for it would be as long as its answer
            where = ".".join(path) + (", null where it may be" if nulls else "") + (" of long names" if long else "")
            where += f" with {otherwise}" if otherwise else ""
            yield Shape(key, version, f"copies in {where}", base, path, field, None)
            inner = [field] if field.struct is None else field.struct.fields
            for one in inner:
                if version in one.versions and not (one.is_array and one is not field) and _can_vary(one):
                    yield Shape(key, version, f"other {one.name} in {where}", base, path, field, one.name)


def _has_texts(struct: StructLayout | None) -> bool:
    return struct is not None and any(one.kind == "string" or _has_texts(one.struct) for one in struct.fields)


def _can_vary(field: FieldLayout) -> bool:
    return field.kind in ("string", "uuid", *_INTS)


def bare(key: int, version: int, topic_id: bytes, *, long: bool = False) -> Any:
    """Return a request with one element in each array; with ``long``, strings have the maximal length."""
    made = _Maker(APIS[key].codec, key, version, topic_id, False, long=long)
    return made.struct(MESSAGES[f"{APIS[key].name}Request"].struct)


def _arrays(
    struct: StructLayout, version: int, value: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[Any, FieldLayout]]:
    """Path and field of every array that has an element in ``value``."""
    for field in struct.fields:
        found = getattr(value, field.name, None) if version in field.versions else None
        if not found or isinstance(found, (str, bytes)):
            continue
        here = (*path, field.name)
        if field.is_array:
            yield here, field
            found = found[0]
        if field.struct is not None:
            yield from _arrays(field.struct, version, found, here)


class _Maker:
    """Makes one value of each kind of struct."""

    def __init__(
        self, module: Any, key: int, version: int, topic_id: bytes, nulls: bool, *, long: bool = False,
        otherwise: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._module = module
        self._key = key
        self._version = version
        self._topic_id = topic_id
        self._nulls = nulls
        self._long = long
        self._otherwise = otherwise or {}
        self.has_nulls = False

    def struct(self, struct: StructLayout) -> Any:
        """Return a struct with a value in every field of the version."""
        values = {field.name: self._field(field, struct) for field in struct.fields if self._version in field.versions}
        return getattr(self._module, struct.name)(**values)

    def _field(self, field: FieldLayout, struct: StructLayout) -> Any:
        if field.stands_for_default:
            return None
        if field.is_array:
            if self._nulls and self._version in field.nullable and struct.name != f"{APIS[self._key].name}Request":
                self.has_nulls = True
                return None
            return [self._one(field, struct)]
        return self._one(field, struct)

    def _one(self, field: FieldLayout, struct: StructLayout) -> Any:
        name = field.name
        if name in self._otherwise:
            return self._otherwise[name]
        if field.is_struct and self._version in field.nullable:
            return None
        if field.struct is not None:
            return self.struct(field.struct)
        if field.kind == "uuid":
            is_named_too = self._key in (3, 20) and any(one.name == "name" for one in struct.fields)
            return self._topic_id if not is_named_too or self._key == 3 else bytes(16)
        if field.kind == "string":
            return self._text(field, struct)
        if field.kind == "bool":
            return name != "allow_auto_topic_creation"
        if field.kind in _INTS:
            return _NUMBERS.get(name, 0)
        return _BATCH if field.kind == "records" else b""

    def _text(self, field: FieldLayout, struct: StructLayout) -> str | None:
        if self._long:
            return STRING_MAX
        if field.name in ("name", "topic_names"):
            if "Config" in struct.name:
                return "retention.ms"
            return SPARE if self._key == 20 else TOPIC
        found = _STRINGS.get(field.name)
        if found is None or (field.name == "transactional_id" and self._key in (0, 22)):
            return None if self._version in field.nullable else ""
        return found
