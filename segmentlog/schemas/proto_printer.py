"""Prints a ``FileDescriptorProto`` as canonical ``.proto`` text: equal files have equal text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from google.protobuf import descriptor_pb2 as pb

from segmentlog.schemas.proto_options import quoted, written_options
from segmentlog.schemas.proto_parser import SCALARS

_Field = pb.FieldDescriptorProto
_SCALAR_NAMES: Final = {number: name for name, number in SCALARS.items()}
_LABEL_NAMES: Final = {_Field.LABEL_REPEATED: "repeated ", _Field.LABEL_REQUIRED: "required "}
_NUMBER_MAX: Final = (1 << 29) - 1
_ENUM_MAX: Final = (1 << 31) - 1


def print_file(file: pb.FileDescriptorProto, *, in_order: bool = False) -> str:
    """Return the canonical text of a file.

    All type names in the file must be full, such as ``.pkg.Message``, the form that a descriptor pool sets.
    ``in_order`` sorts everything whose order has no meaning: imports, options, fields, reserved ranges and names.
    """
    return _Printer(file, in_order).text()


class _Printer:
    def __init__(self, file: pb.FileDescriptorProto, in_order: bool) -> None:
        self._file = file
        self._in_order = in_order
        self._is_proto2 = file.syntax in ("", "proto2")
        self._nested = {name for message in file.message_type for name in _names_in(message)}
        self._known = self._nested | {one.name for one in (*file.message_type, *file.enum_type)}

    def text(self) -> str:
        file = self._file
        parts = [self._syntax()]
        if file.package:
            parts.append(f"package {file.package};\n")
        if file.dependency:
            parts += ["\n", *self._sorted(list(self._imports()))]
        if options := written_options(file.options, in_order=self._in_order):
            parts += ["\n", *(f"option {option};\n" for option in options)]
        for message in file.message_type:
            if not self._is_group(message, file.extension):
                parts += ["\n", *self._message(message, "")]
        for enum in file.enum_type:
            parts += ["\n", *self._enum(enum, "")]
        parts += self._extensions(file.extension, file.message_type, "", "\n")
        for service in file.service:
            parts += ["\n", *self._service(service)]
        return "".join(parts)

    def _syntax(self) -> str:
        if self._file.syntax == "editions":
            return f'edition = "{pb.Edition.Name(self._file.edition).removeprefix("EDITION_")}";\n'
        return f'syntax = "{self._file.syntax or "proto2"}";\n'

    def _imports(self) -> Iterator[str]:
        for index, name in enumerate(self._file.dependency):
            kind = (
                "public " if index in self._file.public_dependency
                else "weak " if index in self._file.weak_dependency else ""
            )  # fmt: skip
            yield f"import {kind}{quoted(name.encode())};\n"

    def _short(self, full_name: str) -> str:
        """Return a type's name without the file's package, if the short name is unambiguous in the whole file."""
        package = self._file.package
        local = full_name.removeprefix(f".{package}.") if package else full_name[1:]
        if not local.startswith("."):
            return full_name if local.partition(".")[0] in self._nested | {package.partition(".")[0]} else local
        first = local[1:].partition(".")[0]
        return full_name if first in self._known or first in package.split(".") else local[1:]

    def _type(self, field: Any) -> str:
        return _SCALAR_NAMES.get(field.type) or self._short(field.type_name)

    def _sorted(self, items: list[Any], key: Any = None) -> list[Any]:
        return sorted(items, key=key) if self._in_order else items

    # ------------------------------------------------------------ messages

    def _message(self, message: pb.DescriptorProto, indent: str) -> Iterator[str]:
        yield f"{indent}message {message.name} {{\n"
        yield from self._body(message, indent + "  ")
        yield f"{indent}}}\n"

    def _body(self, message: pb.DescriptorProto, indent: str) -> Iterator[str]:
        for option in written_options(message.options, in_order=self._in_order):
            yield f"{indent}option {option};\n"
        yield from self._reserved(message, indent, _NUMBER_MAX, 1)
        nested = {one.name: one for one in message.nested_type}
        in_oneofs: set[int] = set()
        for field in self._sorted(list(message.field), key=lambda field: field.number):
            if field.HasField("oneof_index") and not field.proto3_optional:
                if field.oneof_index not in in_oneofs:
                    in_oneofs.add(field.oneof_index)
                    yield from self._oneof(message, field.oneof_index, nested, indent)
            else:
                yield from self._field(field, nested, indent)
        for extended in message.extension_range:
            options = written_options(extended.options, in_order=self._in_order)
            bounds = _range(extended.start, extended.end - 1, _NUMBER_MAX)
            yield f"{indent}extensions {bounds}{_bracketed(options)};\n"
        for one in message.nested_type:
            if not one.options.map_entry and not self._is_group(one, [*message.field, *message.extension]):
                yield "\n"
                yield from self._message(one, indent)
        for enum in message.enum_type:
            yield "\n"
            yield from self._enum(enum, indent)
        yield from self._extensions(message.extension, message.nested_type, indent, "\n")

    @staticmethod
    def _is_group(message: pb.DescriptorProto, fields: Any) -> bool:
        return any(
            field.type == _Field.TYPE_GROUP and field.type_name.rpartition(".")[2] == message.name for field in fields
        )

    def _oneof(self, message: pb.DescriptorProto, index: int, nested: Any, indent: str) -> Iterator[str]:
        oneof = message.oneof_decl[index]
        yield f"{indent}oneof {oneof.name} {{\n"
        for option in written_options(oneof.options, in_order=self._in_order):
            yield f"{indent}  option {option};\n"
        fields = [field for field in message.field if field.HasField("oneof_index") and field.oneof_index == index]
        for field in self._sorted(fields, key=lambda field: field.number):
            yield from self._field(field, nested, indent + "  ", labelled=False)
        yield f"{indent}}}\n"

    def _field(self, field: Any, nested: dict[str, Any], indent: str, *, labelled: bool = True) -> Iterator[str]:
        options = written_options(field.options, in_order=self._in_order)
        if field.HasField("default_value"):
            options.insert(0, f"default = {self._default(field)}")
        if field.HasField("json_name") and field.json_name != _json_name(field.name) and not field.extendee:
            options.insert(0, f"json_name = {quoted(field.json_name.encode())}")
        behind = f" = {field.number}{_bracketed(options)}"
        entry = nested.get(field.type_name.rpartition(".")[2]) if field.type == _Field.TYPE_MESSAGE else None
        if entry is not None and entry.options.map_entry:
            key, value = entry.field
            yield f"{indent}map<{self._type(key)}, {self._type(value)}> {field.name}{behind};\n"
            return
        label = _LABEL_NAMES.get(field.label, "") if labelled else ""
        if labelled and not label and (self._is_proto2 or field.proto3_optional):
            label = "optional "
        if field.type == _Field.TYPE_GROUP:
            group = nested[field.type_name.rpartition(".")[2]]
            yield f"{indent}{label}group {group.name}{behind} {{\n"
            yield from self._body(group, indent + "  ")
            yield f"{indent}}}\n"
        else:
            yield f"{indent}{label}{self._type(field)} {field.name}{behind};\n"

    @staticmethod
    def _default(field: Any) -> str:
        if field.type == _Field.TYPE_STRING:
            return quoted(field.default_value.encode())
        return f'"{field.default_value}"' if field.type == _Field.TYPE_BYTES else str(field.default_value)

    def _reserved(self, holder: Any, indent: str, most: int, behind: int) -> Iterator[str]:
        ranges = self._sorted([(one.start, one.end - behind) for one in holder.reserved_range])
        if ranges:
            yield f"{indent}reserved {', '.join(_range(first, last, most) for first, last in ranges)};\n"
        if holder.reserved_name:
            names = self._sorted(list(holder.reserved_name))
            if self._file.syntax != "editions":
                names = [quoted(name.encode()) for name in names]
            yield f"{indent}reserved {', '.join(names)};\n"

    def _extensions(self, extensions: Any, types: Any, indent: str, before: str) -> Iterator[str]:
        nested = {one.name: one for one in types}
        for field in extensions:
            yield f"{before}{indent}extend {self._short(field.extendee)} {{\n"
            yield from self._field(field, nested, indent + "  ")
            yield f"{indent}}}\n"

    # ------------------------------------------------------------ enums and services

    def _enum(self, enum: pb.EnumDescriptorProto, indent: str) -> Iterator[str]:
        yield f"{indent}enum {enum.name} {{\n"
        for option in written_options(enum.options, in_order=self._in_order):
            yield f"{indent}  option {option};\n"
        yield from self._reserved(enum, indent + "  ", _ENUM_MAX, 0)
        for value in enum.value:  # in file order, also with ``in_order``: the first value is the default
            options = written_options(value.options, in_order=self._in_order)
            yield f"{indent}  {value.name} = {value.number}{_bracketed(options)};\n"
        yield f"{indent}}}\n"

    def _service(self, service: pb.ServiceDescriptorProto) -> Iterator[str]:
        yield f"service {service.name} {{\n"
        for option in written_options(service.options, in_order=self._in_order):
            yield f"  option {option};\n"
        for method in service.method:
            streams = ["stream " if one else "" for one in (method.client_streaming, method.server_streaming)]
            taken, given = self._short(method.input_type), self._short(method.output_type)
            head = f"  rpc {method.name} ({streams[0]}{taken}) returns ({streams[1]}{given})"
            options = written_options(method.options, in_order=self._in_order)
            if options:
                yield f"{head} {{\n{''.join(f'    option {option};{chr(10)}' for option in options)}  }}\n"
            else:
                yield f"{head};\n"
        yield "}\n"


def _names_in(message: Any) -> Iterator[str]:
    """Yield the names of the types nested in a message, at any depth."""
    for one in (*message.nested_type, *message.enum_type):
        yield one.name
    for one in message.nested_type:
        yield from _names_in(one)


def _range(first: int, last: int, most: int) -> str:
    return str(first) if first == last else f"{first} to {'max' if last == most else last}"


def _bracketed(options: list[str]) -> str:
    return f" [{', '.join(options)}]" if options else ""


def _json_name(name: str) -> str:
    """Return the default JSON name that Protobuf gives to a field."""
    result, upper = "", False
    for character in name:
        if character == "_":
            upper = True
        else:
            result += character.upper() if upper else character
            upper = False
    return result
