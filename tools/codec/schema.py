"""The condensed schemas as objects, with the names that they get in Python."""

from __future__ import annotations

import json
import keyword
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

_RENAMED: Final = {"Enable2Pc": "enable_2pc"}
_WORD: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_NO_END: Final = 1 << 15

FORMATS: Final = {"bool": "?", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uuid": "16s"}
SIZES: Final = {"?": 1, "b": 1, "B": 1, "h": 2, "i": 4, "q": 8, "16s": 16, "x": 1}


def snake(name: str) -> str:
    """The name of a field in Python."""
    made = _RENAMED.get(name) or _WORD.sub("_", name).lower()
    if keyword.iskeyword(made):
        raise ValueError(f"{name} is no name for a field")
    return made


def parse_versions(text: str | None) -> range:
    """The versions of a range such as ``3+``, ``0-2``, ``1`` or ``none``."""
    if text is None or text == "none":
        return range(0)
    if text.endswith("+"):
        return range(int(text[:-1]), _NO_END)
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


@dataclass
class Field:
    """A field of a struct."""

    name: str
    kind: str
    is_array: bool
    versions: range
    versions_text: str
    nullable: range
    tagged: range
    tag: int
    default: str | None
    ignorable: bool
    struct: Struct | None

    @property
    def is_struct(self) -> bool:
        """A struct, and no array of them."""
        return self.struct is not None and not self.is_array

    @property
    def stands_for_default(self) -> bool:
        """None stands for a struct of defaults: one that is tagged costs nothing unless it is there."""
        return self.is_struct and bool(self.tagged)

    @property
    def python_type(self) -> str:
        """Its annotation."""
        if self.kind == "records":
            return "Records"
        if self.struct is not None:
            one = self.struct.name
        else:
            one = {"string": "str", "bytes": "bytes", "uuid": "bytes", "bool": "bool"}.get(self.kind, "int")
        made = f"list[{one}]" if self.is_array else one
        return f"{made} | None" if self.nullable or self.stands_for_default else made

    @property
    def value(self) -> str:
        """Its default as an expression for a local variable."""
        if self.default == "null" or self.kind == "records" or self.stands_for_default:
            return "None"
        if self.is_array:
            return "[]"
        if self.struct is not None:
            return f"{self.struct.name}()"
        if self.kind == "string":
            return f'"{self.default or ""}"'
        if self.kind == "bytes":
            return 'b""'
        if self.kind == "uuid":
            return "ZERO_UUID"
        if self.kind == "bool":
            return str((self.default or "false").lower() == "true")
        return str(int(self.default or "0", 0))

    @property
    def class_default(self) -> str:
        """Its default in a class."""
        if self.value == "[]":
            return "msgspec.field(default_factory=list)"
        if self.value.endswith("()"):
            return f"msgspec.field(default_factory={self.value[:-2]})"
        return self.value

    def differs(self, expression: str) -> str:
        """A condition: what the field holds is not its default."""
        match self.value:
            case "None":
                return f"{expression} is not None"
            case "False" | "[]" | '""' | 'b""':
                return expression
            case "True":
                return f"not {expression}"
        return f"{expression} != {self.value}"

    def is_default(self, expression: str) -> str:
        """The opposite condition."""
        differs = self.differs(expression)
        if differs == expression:
            return f"not {expression}"
        if differs == f"not {expression}":
            return expression
        return differs.replace("is not", "is").replace("!=", "==")


@dataclass
class Struct:
    """What one class holds."""

    name: str
    fields: list[Field] = field(default_factory=list)


@dataclass
class Message:
    """A request, a response, or data that lies in a bytes field of one."""

    name: str
    kind: str
    api_key: int
    versions: range
    flexible: range
    latest_unstable: bool
    struct: Struct
    structs: list[Struct]
    """All of them; each after those that it holds."""


def load(path: Path) -> dict[str, Message]:
    """The messages of a file of condensed schemas, by name."""
    return {name: _message(name, facts) for name, facts in json.loads(path.read_text())["messages"].items()}


def _message(name: str, facts: dict[str, Any]) -> Message:
    versions = parse_versions(facts["versions"])
    shared = facts.get("structs", {})
    made: dict[str, Struct] = {}

    def struct_of(struct_name: str, fields: list[dict[str, Any]]) -> Struct:
        if struct_name not in made:
            struct = Struct(struct_name, [field_of(facts) for facts in fields if is_used(facts)])
            made[struct_name] = struct
        return made[struct_name]

    def is_used(facts: dict[str, Any]) -> bool:
        own = parse_versions(facts["versions"])
        return own.start < versions.stop and versions.start < own.stop

    def field_of(facts: dict[str, Any]) -> Field:
        kind = facts["type"].removeprefix("[]")
        inner = facts.get("fields") or shared.get(kind)
        return Field(
            name=snake(facts["name"]),
            kind=kind,
            is_array=facts["type"].startswith("[]"),
            versions=parse_versions(facts["versions"]),
            versions_text=facts["versions"],
            nullable=parse_versions(facts.get("nullable")),
            tagged=parse_versions(facts.get("tagged")),
            tag=facts.get("tag", -1),
            default=facts.get("default"),
            ignorable=facts.get("ignorable", False),
            struct=None if inner is None else struct_of(kind, inner),
        )

    struct = struct_of(name, facts["fields"])
    return Message(
        name=name,
        kind=facts["type"],
        api_key=facts.get("api_key", -1),
        versions=versions,
        flexible=parse_versions(facts["flexible"]),
        latest_unstable=facts.get("latest_unstable", False),
        struct=struct,
        structs=list(made.values()),
    )


def least_size(field: Field, version: int, flexible: bool) -> int:
    """The fewest bytes that a field takes."""
    if field.is_array or field.kind in ("bytes", "records"):
        return 1 if flexible else 4
    if field.kind == "string":
        return 1 if flexible else 2
    if field.struct is not None:
        return 1 if version in field.nullable else least_struct_size(field.struct, version, flexible)
    return SIZES[FORMATS[field.kind]]


def least_struct_size(struct: Struct, version: int, flexible: bool) -> int:
    """The fewest bytes that a struct takes."""
    fields = [field for field in struct.fields if version in field.versions and version not in field.tagged]
    return max(sum(least_size(field, version, flexible) for field in fields) + flexible, 1)
