"""Another codec of Kafka's protocol, kafka-python's, writes the same bytes and reads the same values."""

from __future__ import annotations

import io
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from random import Random
from typing import Any, Final
from uuid import UUID

import kafka.protocol
import pytest
from codec_samples import MESSAGES, codec_of, every_version, sample
from seeds import seeds

from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.layouts import StructLayout

LACKING: Final = {
    "ConsumerGroupDescribeRequest",
    "ConsumerGroupDescribeResponse",
    "ConsumerGroupHeartbeatRequest",
    "ConsumerGroupHeartbeatResponse",
}
"""Messages that kafka-python does not have; `test_round_trips` and the captured ones have to do for them."""

NEWER: Final = [
    ("ApiVersionsRequest", 5),
    ("ApiVersionsResponse", 5),
    ("DeleteGroupsRequest", 3),
    ("DeleteGroupsResponse", 3),
    ("TxnOffsetCommitRequest", 6),
    ("TxnOffsetCommitResponse", 6),
]
"""Versions that kafka-python does not have; `captured/java-4.4.0.txt` has them as Kafka and its clients wrote them."""

RENAMED: Final = {
    "enable_2pc": "enable2_pc",
    "TxnOffsetCommitRequest.generation_id_or_member_epoch": "generation_id",
    "DescribeClusterResponse.cluster_authorized_operations": "authorized_operations",
    "MetadataResponse.cluster_authorized_operations": "authorized_operations",
    "MetadataResponseTopic.topic_authorized_operations": "authorized_operations",
}
"""Fields that it calls something else."""

BITS: Final = {
    ("MetadataResponseTopic", "topic_authorized_operations"),
    ("MetadataResponse", "cluster_authorized_operations"),
    ("DescribeClusterResponse", "cluster_authorized_operations"),
    ("DescribedGroup", "authorized_operations"),
}
"""Bit fields that kafka-python represents as sets; None for the value that means "not requested"."""


def theirs_by_name() -> dict[str, Any]:
    """kafka-python's messages."""
    found = {}
    for module in walk_packages(kafka.protocol.__path__, "kafka.protocol."):
        if ".old" not in module.name:
            for name, value in vars(import_module(module.name)).items():
                if name in MESSAGES:
                    found[name] = value
    return found


THEIRS: Final = theirs_by_name()
COMPARED: Final = [
    pytest.param(name, version, id=f"{name}-{version}")
    for name, version in every_version()
    if name in THEIRS and version <= THEIRS[name].valid_versions[1]
]


def their_name(struct: StructLayout, name: str) -> str:
    """Return kafka-python's name of a field."""
    return RENAMED.get(f"{struct.name}.{name}") or RENAMED.get(name, name)


def bits_of(number: int) -> set[int] | None:
    """Return the set of bits that stands for it."""
    bits = {bit for bit in range(32) if number >> bit & 1}
    return None if bits == {31} else bits


def as_theirs(data_class: Any, struct: StructLayout, ours: Any, version: int) -> Any:
    """Return the same message as one of kafka-python's."""
    values = {}
    for field in struct.fields:
        value = getattr(ours, field.name)
        tagged_default = version in field.tagged and value == getattr(type(ours)(), field.name)
        if version not in field.versions or tagged_default:
            continue
        name = their_name(struct, field.name)
        if field.struct is not None and value is not None:
            inner, inner_class = field.struct, data_class._struct.fields[name].data_class
            if field.is_array:
                value = [as_theirs(inner_class, inner, one, version) for one in value]
            else:
                value = as_theirs(inner_class, inner, value, version)
        elif field.kind == "uuid":
            value = UUID(bytes=value)
        elif (struct.name, field.name) in BITS:
            value = bits_of(value)
        values[name] = value
    return data_class(version=version, **values)


def assert_same(struct: StructLayout, ours: Any, theirs: Any, version: int) -> None:
    """Check that both have the same value in every field of the version."""
    for field in struct.fields:
        if version not in field.versions:
            continue
        our_value, their_value = getattr(ours, field.name), getattr(theirs, their_name(struct, field.name))
        if field.struct is not None and field.is_array:
            assert len(our_value or ()) == len(their_value or ()), field.name
            for our_one, their_one in zip(our_value or (), their_value or (), strict=True):
                assert_same(field.struct, our_one, their_one, version)
        elif field.struct is not None:
            if our_value is not None and their_value is not None:
                assert_same(field.struct, our_value, their_value, version)
            else:
                assert our_value is None
                assert their_value is None or version in field.tagged
        elif field.kind == "uuid":
            assert our_value == (their_value.bytes if their_value else bytes(16)), field.name
        elif (struct.name, field.name) in BITS:
            assert bits_of(our_value) == their_value, field.name
        else:
            assert our_value == their_value, field.name


def test_the_list_of_what_is_lacking_is_not_stale():
    """The list of what kafka-python lacks is complete and exact, in every version."""
    assert set(MESSAGES) - set(THEIRS) == LACKING
    assert [
        (name, version)
        for name, version in every_version()
        if name in THEIRS and version > THEIRS[name].valid_versions[1]
    ] == NEWER
    lines = (Path(__file__).parent / "captured" / "java-4.4.0.txt").read_text().splitlines()
    captured = {tuple(line.split()[:3]) for line in lines}
    keys = {api.name: api.key for api in APIS.values()}
    for name, version in NEWER:
        kind = MESSAGES[name].kind
        assert (kind, str(keys[name.removesuffix(kind.capitalize())]), str(version)) in captured


@pytest.mark.parametrize("seed", seeds("codec oracle"))
@pytest.mark.parametrize(("name", "version"), COMPARED)
def test_another_codec_agrees(name, version, seed):
    """Both codecs encode to the same bytes, and decode each other's bytes to the same values."""
    random = Random(f"{seed} {name} {version}")
    codec, their_class, struct = codec_of(name, version), THEIRS[name], MESSAGES[name].struct
    for _ in range(12):
        ours = sample(name, version, random)
        if name == "ApiVersionsResponse":
            ours.error_code = 0  # kafka-python reads one that is an error as version 0, as a client has to
        encoded = codec.encode(ours)
        theirs = as_theirs(their_class, struct, ours, version)
        assert bytes(theirs.encode()) == encoded
        assert codec.decode(memoryview(bytes(theirs.encode()))) == ours
        if MESSAGES[name].kind == "data":
            assert_same(struct, ours, their_class.decode(io.BytesIO(encoded)), version)
        else:
            assert_same(struct, ours, their_class.decode(encoded, version=version), version)
