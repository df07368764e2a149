"""Layouts of messages, read from the annotations of their classes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

import msgspec

from segmentlog.server.codec.primitives import Records
from segmentlog.server.codec.wire_types import Wire, parse_versions

FORMATS: Final = {"bool": "?", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uuid": "16s"}
"""Format characters of `struct`, by kind; strings, bytes and records have no fixed size."""

SIZES: Final = {"?": 1, "b": 1, "B": 1, "h": 2, "i": 4, "q": 8, "16s": 16, "x": 1}
"""Bytes of each format character."""

_KINDS: Final = {str: "string", bytes: "bytes", bool: "bool"}


@dataclass(frozen=True)
class FieldLayout:
    """A field of a message or of a struct in it.

    kind       Kafka's name of the type (of an element, if the field is an array); the class's name for a struct
    versions, nullable, tagged, tag, ignorable   as in `Wire`; `tagged` has the versions in which the field is tagged
    default    source text of the default
    """

    name: str
    kind: str
    is_array: bool
    versions: range
    nullable: range
    tagged: range
    tag: int
    default: str
    ignorable: bool
    struct: StructLayout | None

    @property
    def is_struct(self) -> bool:
        """Whether the field is a struct, not an array of structs."""
        return self.struct is not None and not self.is_array

    @property
    def stands_for_default(self) -> bool:
        """Whether None means a struct of defaults, so that a decoder creates no object for an absent tagged struct."""
        return self.is_struct and bool(self.tagged)

    def differs(self, expression: str) -> str:
        """Return the source text of a test that ``expression`` is not the default."""
        match self.default:
            case "None":
                return f"{expression} is not None"
            case "False" | "[]" | "''" | "b''":
                return expression
            case "True":
                return f"not {expression}"
        return f"{expression} != {self.default}"

    def is_default(self, expression: str) -> str:
        """Return the source text of a test that ``expression`` is the default."""
        differs = self.differs(expression)
        if differs == expression:
            return f"not {expression}"
        if differs == f"not {expression}":
            return expression
        return differs.replace("is not", "is").replace("!=", "==")


@dataclass(frozen=True)
class StructLayout:
    """Layout of a struct in a message: its class, and its fields in the order in which they are sent."""

    message_class: type[msgspec.Struct]
    fields: tuple[FieldLayout, ...]

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.message_class.__name__


@dataclass(frozen=True)
class MessageLayout:
    """A request, a response, or data inside a bytes field of a message.

    flexible   versions with compact sizes and tagged fields
    structs    every struct of the message, each after the structs that it contains
    bounds     versions at which the layout may change, ascending; the first is the lowest version
    """

    kind: str
    versions: range
    flexible: range
    struct: StructLayout
    structs: tuple[StructLayout, ...]
    bounds: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.struct.name

    def first_alike(self, version: int) -> int:
        """Return the lowest version with the layout of ``version``."""
        return max(bound for bound in self.bounds if bound <= version)


@cache
def layout_of(message_class: Any) -> MessageLayout:
    """Return the layout of a message class, which has ``VERSIONS`` and ``FLEXIBLE``."""
    structs: dict[type, StructLayout] = {}
    struct = _struct(message_class, structs)
    versions, flexible = parse_versions(message_class.VERSIONS), parse_versions(message_class.FLEXIBLE)
    changes = {versions.start, flexible.start}
    for one in structs.values():
        for field in one.fields:
            changes |= {field.versions.start, field.versions.stop, field.nullable.start, field.nullable.stop}
    kind = next((kind for kind in ("request", "response") if struct.name.lower().endswith(kind)), "data")
    bounds = tuple(sorted(change for change in changes if change in versions))
    return MessageLayout(kind, versions, flexible, struct, tuple(structs.values()), bounds)


def _struct(message_class: type[msgspec.Struct], structs: dict[type, StructLayout]) -> StructLayout:
    if message_class not in structs:
        fields = tuple(_field(info, structs) for info in msgspec.structs.fields(message_class))
        structs[message_class] = StructLayout(message_class, fields)
    return structs[message_class]


def _field(info: msgspec.structs.FieldInfo, structs: dict[type, StructLayout]) -> FieldLayout:
    plain, marks = _unwrapped(info.type)
    wire = next((mark for mark in marks if isinstance(mark, Wire)), Wire())
    is_optional, is_array, is_records = False, False, plain == Records
    if get_origin(plain) in (Union, UnionType) and not is_records:
        (inner,) = (one for one in get_args(plain) if one is not NoneType)
        plain, more = _unwrapped(inner)
        is_optional, marks = True, marks + more
    if get_origin(plain) is list:
        plain, more = _unwrapped(get_args(plain)[0])
        is_array, marks = True, marks + more
    struct = _struct(plain, structs) if isinstance(plain, type) and issubclass(plain, msgspec.Struct) else None
    named = next((mark for mark in marks if isinstance(mark, str)), None)
    is_tagged_struct = struct is not None and not is_array and wire.tag >= 0
    null_means_null = is_records or (is_optional and not is_tagged_struct)
    versions = parse_versions(wire.versions)
    return FieldLayout(
        name=info.name,
        kind="records" if is_records else struct.name if struct is not None else named or _KINDS[plain],
        is_array=is_array,
        versions=versions,
        nullable=parse_versions(wire.nullable or (wire.versions if null_means_null else "none")),
        tagged=versions if wire.tag >= 0 else range(0),
        tag=wire.tag,
        default=_default(info, is_uuid=named == "uuid"),
        ignorable=wire.ignorable,
        struct=struct,
    )


def _unwrapped(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(annotation) is Annotated:
        return annotation.__origin__, annotation.__metadata__
    return annotation, ()


def _default(info: msgspec.structs.FieldInfo, *, is_uuid: bool) -> str:
    if info.default_factory is not msgspec.NODEFAULT:
        return "[]" if info.default_factory is list else f"{info.default_factory.__name__}()"
    return "ZERO_UUID" if is_uuid else repr(info.default)


def least_size(field: FieldLayout, version: int, flexible: bool) -> int:
    """Return the minimum size in bytes of a field."""
    if field.is_array or field.kind in ("bytes", "records"):
        return 1 if flexible else 4
    if field.kind == "string":
        return 1 if flexible else 2
    if field.struct is not None:
        return 1 if version in field.nullable else least_struct_size(field.struct, version, flexible)
    return SIZES[FORMATS[field.kind]]


def least_struct_size(struct: StructLayout, version: int, flexible: bool) -> int:
    """Return the minimum size in bytes of a struct."""
    fields = [field for field in struct.fields if version in field.versions and version not in field.tagged]
    return max(sum(least_size(field, version, flexible) for field in fields) + flexible, 1)
