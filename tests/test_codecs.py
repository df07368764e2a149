"""Codecs: values survive a round trip, and wrong values raise errors."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import pydantic
import pytest

from segmentlog.codecs import Codec, json_codec, msgpack_codec, text_codec
from segmentlog.errors import InvalidConfig


class Click(msgspec.Struct):
    """One of msgspec's."""

    page: str
    at: datetime


@dataclass
class Order:
    """One of the standard library's."""

    number: int
    notes: list[str]


class User(pydantic.BaseModel):
    """One of pydantic's."""

    name: str
    born: datetime
    picture: bytes = b"none"


SAMPLES = [
    (Click, Click("/home", datetime(2026, 1, 2, tzinfo=UTC))),
    (Order, Order(7, ["late", "ä"])),
    (User, User(name="Ann", born=datetime(1990, 1, 2, tzinfo=UTC))),
    (dict[str, int], {"a": 1}),
    (None, {"any": [1, 2.5, None, "x"]}),
]


@pytest.mark.parametrize("make", [json_codec, msgpack_codec])
@pytest.mark.parametrize(("kind", "value"), SAMPLES, ids=lambda one: getattr(one, "__name__", ""))
def test_what_is_written_is_read(make: object, kind: object, value: object) -> None:
    """Each kind of type survives both formats; a tombstone stays a tombstone."""
    codec = make() if kind is None else make(kind)  # type: ignore[operator]
    data = codec.serialize("t", [value, None, value])
    assert data[1] is None
    assert isinstance(data[0], bytes)
    assert codec.deserialize("t", data) == [value, None, value]


@pytest.mark.parametrize("make", [json_codec, msgpack_codec])
@pytest.mark.parametrize("kind", [Click, Order, User])
def test_what_is_of_another_type_is_refused(make: object, kind: object) -> None:
    """Reading raises an error for a missing field and for bytes that are not a document."""
    codec: Codec[object] = make(kind)  # type: ignore[operator]
    other = make().serialize("t", [{"name": 3}])  # type: ignore[operator]
    for data in (other, [b"\xff{"], [b""]):
        with pytest.raises((ValueError, msgspec.DecodeError)):
            codec.deserialize("t", data)


def test_a_lenient_codec_takes_numbers_in_quotes() -> None:
    """This holds with ``strict=False``, for msgspec and for pydantic."""
    assert json_codec(Order, strict=False).deserialize("t", [b'{"number":"7","notes":[]}']) == [Order(7, [])]

    class Strict(pydantic.BaseModel, strict=True):
        number: int

    with pytest.raises(ValueError, match="valid integer"):
        json_codec(Strict).deserialize("t", [b'{"number":"7"}'])
    assert json_codec(Strict, strict=False).deserialize("t", [b'{"number":"7"}']) == [Strict(number=7)]


def test_texts() -> None:
    """Texts use the requested encoding, and other bytes are refused."""
    assert text_codec("latin-1").serialize("t", ["ä", None]) == [b"\xe4", None]
    assert text_codec().deserialize("t", ["ä".encode(), None]) == ["ä", None]
    with pytest.raises(TypeError, match="expected a str, found int"):
        text_codec().serialize("t", [3])  # type: ignore[list-item]
    with pytest.raises(InvalidConfig, match="the name of a text encoding"):
        text_codec("utf-88")


def test_a_type_that_nobody_reads_is_refused_at_once() -> None:
    """The constructor refuses it, before any record."""
    with pytest.raises(InvalidConfig, match="a type that msgspec reads"):
        json_codec(Click | Order)
    with pytest.raises(InvalidConfig, match="kind"):
        msgpack_codec({3: 4})
