"""Vocabulary of the generated message classes: how each field is encoded, and which versions have it.

The annotation of a field holds all that the codec depends on:

    throttle_time_ms: Int32 = 0                                           in every version of the message
    topic_id: Annotated[Uuid, Wire("13+")] = ZERO_UUID                    from version 13 on
    name: Annotated[str | None, Wire(nullable="2-5")] = None              null is allowed in versions 2 to 5
    cluster_id: Annotated[str | None, Wire("12+", tag=0)] = None          a tagged field

`layouts` reads the annotations, and `compiler` compiles encoders and decoders from them.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple, TypeAlias

Int8: TypeAlias = Annotated[int, "int8"]
Int16: TypeAlias = Annotated[int, "int16"]
Int32: TypeAlias = Annotated[int, "int32"]
Int64: TypeAlias = Annotated[int, "int64"]
Uuid: TypeAlias = Annotated[bytes, "uuid"]

_NO_END = 1 << 15


class Wire(NamedTuple):
    """Versions of a field, in the notation of Kafka's schemas: ``3+``, ``0-2``, ``1`` or ``none``.

    versions    versions that have the field
    nullable    versions in which null is allowed; None for all of them, where the type allows None
    tag         number of a tagged field; -1 for a field with a fixed place
    ignorable   whether an encoder may omit the value in a version that does not have the field
    """

    versions: str = "0+"
    nullable: str | None = None
    tag: int = -1
    ignorable: bool = False


def parse_versions(text: str) -> range:
    """Return the versions that ``3+``, ``0-2``, ``1`` or ``none`` stands for."""
    if text == "none":
        return range(0)
    if text.endswith("+"):
        return range(int(text[:-1]), _NO_END)
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)
