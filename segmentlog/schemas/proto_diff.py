"""Compares two Protobuf files, and finds changes that keep readers of the new file from reading old data.

The names of changes, and which changes are incompatible, come from Confluent's registry. Fields are matched by number.
docs/schemas.md lists what this comparison ignores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

_F = FieldDescriptor
_NUMBER: Final = "number"
_SCALAR_KINDS: Final = {
    **dict.fromkeys(
        (_F.TYPE_INT32, _F.TYPE_INT64, _F.TYPE_UINT32, _F.TYPE_UINT64, _F.TYPE_BOOL, _F.TYPE_ENUM), _NUMBER
    ),
    **dict.fromkeys((_F.TYPE_SINT32, _F.TYPE_SINT64), "signed number"),
    **dict.fromkeys((_F.TYPE_STRING, _F.TYPE_BYTES), "string or bytes"),
    **dict.fromkeys((_F.TYPE_FIXED32, _F.TYPE_SFIXED32), "fixed32"),
    **dict.fromkeys((_F.TYPE_FIXED64, _F.TYPE_SFIXED64), "fixed64"),
    _F.TYPE_FLOAT: "float",
    _F.TYPE_DOUBLE: "double",
}
"""Scalar types by their encoding: a field may change between types with the same encoding."""

Change = tuple[str, str]
"""(kind of change, path)"""


def incompatible_changes(original: FileDescriptor, update: FileDescriptor) -> list[Change]:
    """Return the changes that break readers; empty if there are none."""
    diff = _Diff()
    if original.package != update.package:
        diff.note("PACKAGE_CHANGED", "#/")
    diff.messages(original.message_types_by_name.values(), update.message_types_by_name.values(), "#")
    return list(dict.fromkeys(diff.found))


class _Diff:
    def __init__(self) -> None:
        self.found: list[Change] = []
        self._under_way: set[tuple[str, str]] = set()

    def note(self, kind: str, place: str) -> None:
        self.found.append((kind, place))

    def messages(self, original: Iterable[Descriptor], update: Iterable[Descriptor], place: str) -> None:
        after = {message.name: message for message in update}
        for message in original:
            if message.GetOptions().map_entry:
                continue
            if message.name not in after:
                self.note("MESSAGE_REMOVED", f"{place}/{message.name}")
            else:
                self.message(message, after[message.name], f"{place}/{message.name}")

    def message(self, original: Descriptor, update: Descriptor, place: str) -> None:
        pair = (original.full_name, update.full_name)
        if pair in self._under_way:
            return  # a recursive message: the outer comparison of this pair finds its differences
        self._under_way.add(pair)
        self._oneofs(original, update, place)
        before, after = original.fields_by_number, update.fields_by_number
        for number in sorted({*before, *after}):
            old, new = before.get(number), after.get(number)
            where = f"{place}/{number}"
            if old is None:
                if new is not None and new.is_required:
                    self.note("REQUIRED_FIELD_ADDED", where)
            elif new is None:
                self._removed(old, update, where)
            else:
                self.found += self._field(old, new, where)
        self.messages(original.nested_types, update.nested_types, place)
        self._under_way.discard(pair)

    def _removed(self, field: FieldDescriptor, update: Descriptor, where: str) -> None:
        if field.is_required:
            self.note("REQUIRED_FIELD_REMOVED", where)
        oneof = _oneof(field)
        if oneof is None:
            return
        members = [one.number for one in field.containing_oneof.fields]
        if oneof in {_oneof(one) for one in update.fields} or any(
            number in update.fields_by_number for number in members
        ):
            self.note("ONEOF_FIELD_REMOVED", where)

    def _oneofs(self, original: Descriptor, update: Descriptor, place: str) -> None:
        """Record fields that could be set together before, and exclude each other now."""
        for name in dict.fromkeys(_oneof(field) for field in update.fields):
            if name is None:
                continue
            groups: set[str] = set()
            alone = 0
            for field in update.oneofs_by_name[name].fields:
                old = original.fields_by_number.get(field.number)
                if old is None:
                    continue
                if (known := _oneof(old)) is not None:
                    groups.add(f"oneof {known}")
                else:
                    groups.add(f"field {old.number}")
                    alone += 1
            if len(groups) > 1:
                kind = "MULTIPLE_FIELDS_MOVED_TO_ONEOF" if alone > 1 else "FIELD_MOVED_TO_EXISTING_ONEOF"
                self.note(kind, f"{place}/{name}")

    def _field(self, original: FieldDescriptor, update: FieldDescriptor, where: str) -> Iterator[Change]:
        kinds = _kind(original), _kind(update)
        if kinds[0] != kinds[1]:
            yield "FIELD_KIND_CHANGED", where
        elif kinds[0] == "scalar":
            scalars = _SCALAR_KINDS[original.type], _SCALAR_KINDS[update.type]
            if scalars[0] != scalars[1]:
                yield "FIELD_SCALAR_KIND_CHANGED", where
            elif original.is_repeated != update.is_repeated and scalars[0] != "string or bytes":
                # A reader cannot decode a packed list as a number. For strings and bytes it takes the last element.
                yield "FIELD_NUMERIC_LABEL_CHANGED", where
        elif kinds[0] == "map":
            for name in ("key", "value"):
                yield from self._field(
                    original.message_type.fields_by_name[name], update.message_type.fields_by_name[name], where
                )
        else:
            yield from self._message_type(original.message_type, update.message_type, where)

    def _message_type(self, original: Descriptor, update: Descriptor, where: str) -> Iterator[Change]:
        if _local_name(original) != _local_name(update):
            yield "FIELD_NAMED_TYPE_CHANGED", where
        elif original.file.name != "default" or update.file.name != "default":
            # The message comes from an imported file, so no other comparison covers it.
            apart = _Diff()
            apart._under_way = self._under_way
            apart.message(original, update, where)
            yield from apart.found
            if apart.found:
                yield "FIELD_NAMED_TYPE_CHANGED", where


def _oneof(field: Any) -> str | None:
    """Return the name of a field's oneof, or None; the synthetic oneof of an optional proto3 field does not count."""
    oneof = field.containing_oneof
    if oneof is None or (len(oneof.fields) == 1 and oneof.name.lstrip("X") == f"_{field.name}"):
        return None
    return str(oneof.name)


def _kind(field: FieldDescriptor) -> str:
    if field.message_type is None:
        return "scalar"
    return "map" if field.message_type.GetOptions().map_entry else "message"


def _local_name(message: Descriptor) -> str:
    package = message.file.package
    full_name = str(message.full_name)
    return full_name.removeprefix(f"{package}.") if package else full_name
