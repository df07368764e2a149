"""Parses the text of a ``.proto`` file into a ``FileDescriptorProto``, without resolving names of types."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2 as pb

from segmentlog.schemas.proto_options import escaped, read_bracketed, read_option
from segmentlog.schemas.proto_tokens import Tokens, as_int
from segmentlog.schemas.registry_errors import InvalidSchema

_Field = pb.FieldDescriptorProto
SCALARS: Final = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in [
        "double",
        "float",
        "int32",
        "int64",
        "uint32",
        "uint64",
        "sint32",
        "sint64",
        "fixed32",
        "fixed64",
        "sfixed32",
        "sfixed64",
        "bool",
        "string",
        "bytes",
    ]
}
_LABELS: Final = {
    "optional": _Field.LABEL_OPTIONAL,
    "required": _Field.LABEL_REQUIRED,
    "repeated": _Field.LABEL_REPEATED,
}
_NUMBER_MAX: Final = (1 << 29) - 1
_ENUM_MAX: Final = (1 << 31) - 1


def parse_file(text: str, name: str) -> pb.FileDescriptorProto:
    """Parse a ``.proto`` file. Raises `InvalidSchema` with the line number."""
    return _Parser(text, name).file()


class _Parser:
    def __init__(self, text: str, name: str) -> None:
        self._tokens = Tokens(text)
        self._file = pb.FileDescriptorProto(name=name)
        self._is_proto3 = False

    def file(self) -> pb.FileDescriptorProto:
        tokens, file = self._tokens, self._file
        if tokens.is_next("syntax", "edition"):
            self._syntax(tokens.take().text)
        while tokens.next.kind != "end":
            if tokens.skip(";"):
                continue
            word = tokens.read_name()
            if word == "import":
                self._import()
            elif word == "package":
                file.package = tokens.read_type_name()
                tokens.expect(";")
            elif word == "option":
                read_option(tokens, file.options)
                tokens.expect(";")
            elif word == "message":
                self._message(file.message_type.add())
            elif word == "enum":
                self._enum(file.enum_type.add())
            elif word == "service":
                self._service(file.service.add())
            elif word == "extend":
                self._extend(file.extension, file.message_type)
            else:
                raise InvalidSchema(f"Invalid Protobuf schema: {word!r} does not start a statement of a .proto file")
        return file

    def _syntax(self, word: str) -> None:
        tokens = self._tokens
        tokens.expect("=")
        version = tokens.read_text()
        if word == "edition":
            number = pb.Edition.DESCRIPTOR.values_by_name.get(f"EDITION_{version}")
            if number is None:
                tokens.fail(f"edition {version!r} is not supported")
            self._file.syntax, self._file.edition = "editions", number.number
        elif version not in ("proto2", "proto3"):
            tokens.fail(f"syntax {version!r} must be proto2 or proto3")
        else:
            self._file.syntax = version
            self._is_proto3 = version == "proto3"
        tokens.expect(";")

    def _import(self) -> None:
        tokens, file = self._tokens, self._file
        kind = tokens.read_name() if tokens.is_next("public", "weak") else ""
        file.dependency.append(tokens.read_text())
        if kind:
            getattr(file, f"{kind}_dependency").append(len(file.dependency) - 1)
        tokens.expect(";")

    # ------------------------------------------------------------ messages

    def _message(self, message: pb.DescriptorProto) -> None:
        message.name = self._tokens.read_name()
        self._body(message)

    def _body(self, message: pb.DescriptorProto) -> None:
        tokens = self._tokens
        tokens.expect("{")
        while not tokens.skip("}"):
            if tokens.skip(";"):
                continue
            # A type may have any of these words as its name, and a field then starts with it.
            word = tokens.next.text if tokens.next.kind == "word" else ""
            if word == "message" and not tokens.is_second("."):
                tokens.take()
                self._message(message.nested_type.add())
            elif word == "enum" and not tokens.is_second("."):
                tokens.take()
                self._enum(message.enum_type.add())
            elif word == "option" and not tokens.is_second("."):
                tokens.take()
                read_option(tokens, message.options)
                tokens.expect(";")
            elif word == "extend" and not tokens.is_second("."):
                tokens.take()
                self._extend(message.extension, message.nested_type)
            elif word == "oneof" and not tokens.is_second("."):
                tokens.take()
                self._oneof(message)
            elif word == "extensions" and not tokens.is_second("."):
                tokens.take()
                self._extensions(message)
            elif word == "reserved" and not tokens.is_second("."):
                tokens.take()
                self._reserved(message, _NUMBER_MAX, 1)
            else:
                self._field(message.field.add(), message.nested_type, message)
        self._add_synthetic(message)

    @staticmethod
    def _add_synthetic(message: pb.DescriptorProto) -> None:
        """Add a synthetic oneof for each optional proto3 field, after all other oneofs, as Protobuf requires."""
        for field in message.field:
            if field.proto3_optional:
                field.oneof_index = len(message.oneof_decl)
                taken = {one.name for one in message.oneof_decl} | {one.name for one in message.field}
                name = f"_{field.name}"
                while name in taken:
                    name = f"X{name}"
                message.oneof_decl.add(name=name)

    def _field(self, field: Any, types: Any, message: pb.DescriptorProto | None, oneof: int | None = None) -> None:
        tokens = self._tokens
        if tokens.is_next(*_LABELS) and not tokens.is_second("."):
            if oneof is not None:
                tokens.fail("a field of a oneof must not have a label")
            label = tokens.take().text
            field.label = _LABELS[label]
            if self._is_proto3 and label == "optional" and message is not None:
                field.proto3_optional = True
        else:
            field.label = _Field.LABEL_OPTIONAL
        if oneof is not None:
            field.oneof_index = oneof
        if tokens.is_next("map") and tokens.is_second("<"):
            if message is None or oneof is not None:
                tokens.fail("a map field must be inside a message")
            self._map(field, message)
            return
        if tokens.is_next("group"):
            tokens.take()
            self._group(field, types)
            return
        self._type(field)
        field.name = tokens.read_name()
        self._number(field)
        tokens.expect(";")

    def _type(self, field: Any) -> None:
        name = self._tokens.read_type_name()
        if name in SCALARS:
            field.type = SCALARS[name]
        else:
            field.type_name = name

    def _number(self, field: Any) -> None:
        tokens = self._tokens
        tokens.expect("=")
        field.number = self._number_within(tokens.read_integer(), 1, _NUMBER_MAX)

        def default(tokens: Tokens) -> None:
            field.default_value = self._default(field)

        def json_name(tokens: Tokens) -> None:
            field.json_name = tokens.read_text()

        read_bracketed(tokens, field.options, {"default": default, "json_name": json_name})

    def _default(self, field: Any) -> str:
        tokens = self._tokens
        if tokens.next.kind == "string":
            data = tokens.read_string()
            if field.type == _Field.TYPE_BYTES:
                return escaped(data)
            return data.decode(errors="replace")
        sign = "-" if tokens.skip("-") else ""
        token = tokens.take()
        if token.kind == "int" and field.type not in (_Field.TYPE_DOUBLE, _Field.TYPE_FLOAT):
            return f"{sign}{as_int(token.text)}"
        return sign + token.text

    def _number_within(self, number: int, least: int, most: int) -> int:
        if not least <= number <= most:
            self._tokens.fail(f"{number} must be a number from {least} to {most}")
        return number

    def _map(self, field: Any, message: pb.DescriptorProto) -> None:
        tokens = self._tokens
        tokens.take()
        tokens.expect("<")
        entry = pb.DescriptorProto()
        entry.options.map_entry = True
        key = entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL)
        self._type(key)
        tokens.expect(",")
        value = entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL)
        self._type(value)
        tokens.expect(">")
        field.name, field.label = tokens.read_name(), _Field.LABEL_REPEATED
        self._number(field)
        tokens.expect(";")
        entry.name = "".join(part[:1].upper() + part[1:] for part in field.name.split("_")) + "Entry"
        message.nested_type.append(entry)
        # Qualify the name: an outer scope may also have a type with the name of the entry.
        field.type, field.type_name = _Field.TYPE_MESSAGE, f"{message.name}.{entry.name}"

    def _group(self, field: Any, types: Any) -> None:
        name = self._tokens.read_name()
        field.type, field.type_name, field.name = _Field.TYPE_GROUP, name, name.lower()
        self._number(field)
        message = types.add(name=name)
        self._body(message)

    def _oneof(self, message: pb.DescriptorProto) -> None:
        tokens = self._tokens
        index = len(message.oneof_decl)
        oneof = message.oneof_decl.add(name=tokens.read_name())
        tokens.expect("{")
        while not tokens.skip("}"):
            if tokens.skip(";"):
                continue
            if tokens.is_next("option") and not tokens.is_second("."):
                tokens.take()
                read_option(tokens, oneof.options)
                tokens.expect(";")
            else:
                self._field(message.field.add(), message.nested_type, message, index)

    def _ranges(self, most: int, least: int) -> list[tuple[int, int]]:
        tokens, found = self._tokens, []
        while True:
            first = last = self._number_within(tokens.read_integer(), least, most)
            if tokens.skip("to"):
                last = most if tokens.skip("max") else self._number_within(tokens.read_integer(), first, most)
            found.append((first, last))
            if not tokens.skip(","):
                return found

    def _extensions(self, message: pb.DescriptorProto) -> None:
        ranges = [
            message.extension_range.add(start=first, end=last + 1) for first, last in self._ranges(_NUMBER_MAX, 1)
        ]
        options = pb.ExtensionRangeOptions()
        read_bracketed(self._tokens, options)
        for one in ranges:
            if options.ListFields():
                one.options.CopyFrom(options)
        self._tokens.expect(";")

    def _reserved(self, holder: Any, most: int, least: int) -> None:
        tokens = self._tokens
        if tokens.next.kind in ("string", "word"):
            while True:
                holder.reserved_name.append(tokens.read_text() if tokens.next.kind == "string" else tokens.read_name())
                if not tokens.skip(","):
                    break
        else:
            behind = 1 if isinstance(holder, pb.DescriptorProto) else 0  # reserved ranges of enums include their end
            for first, last in self._ranges(most, least):
                holder.reserved_range.add(start=first, end=last + behind)
        tokens.expect(";")

    def _extend(self, extensions: Any, types: Any) -> None:
        tokens = self._tokens
        extendee = tokens.read_type_name()
        tokens.expect("{")
        while not tokens.skip("}"):
            if not tokens.skip(";"):
                field = extensions.add(extendee=extendee)
                self._field(field, types, None)

    # ------------------------------------------------------------ enums and services

    def _enum(self, enum: pb.EnumDescriptorProto) -> None:
        tokens = self._tokens
        enum.name = tokens.read_name()
        tokens.expect("{")
        while not tokens.skip("}"):
            if tokens.skip(";"):
                continue
            if tokens.is_next("option") and not tokens.is_second("="):
                tokens.take()
                read_option(tokens, enum.options)
                tokens.expect(";")
            elif tokens.is_next("reserved") and not tokens.is_second("="):
                tokens.take()
                self._reserved(enum, _ENUM_MAX, -_ENUM_MAX - 1)
            else:
                value = enum.value.add(name=tokens.read_name())
                tokens.expect("=")
                value.number = self._number_within(tokens.read_integer(), -_ENUM_MAX - 1, _ENUM_MAX)
                read_bracketed(tokens, value.options)
                tokens.expect(";")

    def _service(self, service: pb.ServiceDescriptorProto) -> None:
        tokens = self._tokens
        service.name = tokens.read_name()
        tokens.expect("{")
        while not tokens.skip("}"):
            if tokens.skip(";"):
                continue
            if tokens.skip("option"):
                read_option(tokens, service.options)
                tokens.expect(";")
            else:
                tokens.expect("rpc")
                self._method(service.method.add())

    def _method(self, method: pb.MethodDescriptorProto) -> None:
        tokens = self._tokens
        method.name = tokens.read_name()
        method.client_streaming, method.input_type = self._message_of_method()
        tokens.expect("returns")
        method.server_streaming, method.output_type = self._message_of_method()
        if not tokens.skip("{"):
            tokens.expect(";")
            return
        while not tokens.skip("}"):
            if not tokens.skip(";"):
                tokens.expect("option")
                read_option(tokens, method.options)
                tokens.expect(";")

    def _message_of_method(self) -> tuple[bool, str]:
        tokens = self._tokens
        tokens.expect("(")
        streams = not tokens.is_second(")") and tokens.skip("stream")
        name = tokens.read_type_name()
        tokens.expect(")")
        return streams, name
