"""Compares two Protobuf files, and finds changes after which a reader with the new file cannot read old data.

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
    """Return the changes after which a reader with the new file cannot read old data; empty if there are none."""
    diff = _Diff()
    if original.package != update.package:
        diff.add_change("PACKAGE_CHANGED", "#/")
    diff.compare_messages(original.message_types_by_name.values(), update.message_types_by_name.values(), "#")
    return list(dict.fromkeys(diff.found))


class _Diff:
    def __init__(self) -> None:
        self.found: list[Change] = []
        self._open_pairs: set[tuple[str, str]] = set()

    def add_change(self, kind: str, place: str) -> None:
        self.found.append((kind, place))

    def compare_messages(self, original: Iterable[Descriptor], update: Iterable[Descriptor], place: str) -> None:
        after = {message.name: message for message in update}
        for message in original:
            if message.GetOptions().map_entry:
                continue
            if message.name not in after:
                self.add_change("MESSAGE_REMOVED", f"{place}/{message.name}")
            else:
                self.compare_message(message, after[message.name], f"{place}/{message.name}")

    def compare_message(self, original: Descriptor, update: Descriptor, place: str) -> None:
        pair = (original.full_name, update.full_name)
        if pair in self._open_pairs:
            return  # a recursive message: the outer comparison of this pair finds its differences
        self._open_pairs.add(pair)
        self._compare_oneofs(original, update, place)
        before, after = original.fields_by_number, update.fields_by_number
        for number in sorted({*before, *after}):
            old, new = before.get(number), after.get(number)
            field_place = f"{place}/{number}"
            if old is None:
                if new is not None and new.is_required:
                    self.add_change("REQUIRED_FIELD_ADDED", field_place)
            elif new is None:
                self._compare_removed_field(old, update, field_place)
            else:
                self.found += self._field_changes(old, new, field_place)
        self.compare_messages(original.nested_types, update.nested_types, place)
        self._open_pairs.discard(pair)

    def _compare_removed_field(self, field: FieldDescriptor, update: Descriptor, place: str) -> None:
        if field.is_required:
            self.add_change("REQUIRED_FIELD_REMOVED", place)
        oneof = _oneof_name(field)
        if oneof is None:
            return
        members = [member.number for member in field.containing_oneof.fields]
        if oneof in {_oneof_name(other) for other in update.fields} or any(
            number in update.fields_by_number for number in members
        ):
            self.add_change("ONEOF_FIELD_REMOVED", place)

    def _compare_oneofs(self, original: Descriptor, update: Descriptor, place: str) -> None:
        """Add a change for each oneof whose fields could be set together before."""
        for name in dict.fromkeys(_oneof_name(field) for field in update.fields):
            if name is None:
                continue
            groups: set[str] = set()
            single_field_count = 0
            for field in update.oneofs_by_name[name].fields:
                old = original.fields_by_number.get(field.number)
                if old is None:
                    continue
                if (name_before := _oneof_name(old)) is not None:
                    groups.add(f"oneof {name_before}")
                else:
                    groups.add(f"field {old.number}")
                    single_field_count += 1
            if len(groups) > 1:
                kind = "MULTIPLE_FIELDS_MOVED_TO_ONEOF" if single_field_count > 1 else "FIELD_MOVED_TO_EXISTING_ONEOF"
                self.add_change(kind, f"{place}/{name}")

    def _field_changes(self, original: FieldDescriptor, update: FieldDescriptor, place: str) -> Iterator[Change]:
        kinds = _kind(original), _kind(update)
        if kinds[0] != kinds[1]:
            yield "FIELD_KIND_CHANGED", place
        elif kinds[0] == "scalar":
            scalars = _SCALAR_KINDS[original.type], _SCALAR_KINDS[update.type]
            if scalars[0] != scalars[1]:
                yield "FIELD_SCALAR_KIND_CHANGED", place
            elif original.is_repeated != update.is_repeated and scalars[0] != "string or bytes":
                # A reader cannot decode a packed list as a number. For strings and bytes it takes the last element.
                yield "FIELD_NUMERIC_LABEL_CHANGED", place
        elif kinds[0] == "map":
            for name in ("key", "value"):
                yield from self._field_changes(
                    original.message_type.fields_by_name[name], update.message_type.fields_by_name[name], place
                )
        else:
            yield from self._message_type_changes(original.message_type, update.message_type, place)

    def _message_type_changes(self, original: Descriptor, update: Descriptor, place: str) -> Iterator[Change]:
        if _local_name(original) != _local_name(update):
            yield "FIELD_NAMED_TYPE_CHANGED", place
        elif original.file.name != "default" or update.file.name != "default":
            # The message comes from an imported file, so no other comparison covers it.
            imported = _Diff()
            imported._open_pairs = self._open_pairs
            imported.compare_message(original, update, place)
            yield from imported.found
            if imported.found:
                yield "FIELD_NAMED_TYPE_CHANGED", place


def _oneof_name(field: Any) -> str | None:
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
