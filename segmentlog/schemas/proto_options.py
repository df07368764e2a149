"""Reads and prints the options of a ``.proto`` file.

Options that Protobuf defines become fields of its options messages. All other options, such as ``(my.option) = 1``,
become uninterpreted options: their names and values as text.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2 as pb
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from segmentlog.schemas.proto_tokens import Tokens, as_int

_FLOATS: Final = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)


def read_option(tokens: Tokens, options: Any) -> None:
    """Read ``name = value`` into ``options``."""
    parts: list[tuple[str, bool]] = []
    while True:
        if tokens.skip("("):
            parts.append((tokens.read_type_name(), True))
            tokens.expect(")")
        else:
            parts.append((tokens.read_name(), False))
        if not tokens.skip("."):
            break
    tokens.expect("=")
    field = options.DESCRIPTOR.fields_by_name.get(parts[0][0]) if len(parts) == 1 and not parts[0][1] else None
    if field is not None and field.type != FieldDescriptor.TYPE_MESSAGE:
        _read_known(tokens, options, field)
        return
    option = options.uninterpreted_option.add()
    for name, is_extension in parts:
        option.name.add(name_part=name, is_extension=is_extension)
    _read_unknown(tokens, option)


def read_bracketed(tokens: Tokens, options: Any, special: dict[str, Any] | None = None) -> None:
    """Read ``[a = 1, b = 2]`` if it comes next; ``special`` maps names to functions that read their values."""
    if not tokens.skip("["):
        return
    while True:
        if special and tokens.next.text in special and tokens.is_second("="):
            name = tokens.take().text
            tokens.expect("=")
            special[name](tokens)
        else:
            read_option(tokens, options)
        if not tokens.skip(","):
            break
    tokens.expect("]")


def _read_known(tokens: Tokens, options: Any, field: FieldDescriptor) -> None:
    value: Any
    if field.type == FieldDescriptor.TYPE_BOOL:
        value = tokens.read_name()
        if value not in ("true", "false"):
            tokens.fail(f"option {field.name} must be true or false")
        value = value == "true"
    elif field.type == FieldDescriptor.TYPE_ENUM:
        name = tokens.read_name()
        values = field.enum_type.values_by_name
        if name not in values:
            tokens.fail(f"option {field.name} must be one of {', '.join(values)}")
        value = values[name].number
    elif field.type == FieldDescriptor.TYPE_STRING:
        value = tokens.read_text()
    else:
        value = tokens.read_integer()
    if field.is_repeated:
        getattr(options, field.name).append(value)
    else:
        setattr(options, field.name, value)


def _read_unknown(tokens: Tokens, option: pb.UninterpretedOption) -> None:
    token = tokens.next
    if token.kind == "string":
        option.string_value = tokens.read_string()
    elif tokens.is_next("{"):
        option.aggregate_value = _braced(tokens)
    elif token.kind == "word":
        option.identifier_value = tokens.read_name()
    else:
        negative = tokens.skip("-") or (tokens.skip("+") and False)
        number = tokens.take()
        if number.kind == "int":
            value = as_int(number.text)
            if negative:
                option.negative_int_value = -value
            else:
                option.positive_int_value = value
        elif number.kind == "float" or number.text in ("inf", "nan"):
            option.double_value = float(number.text.rstrip("fF")) * (-1 if negative else 1)
        else:
            tokens.fail("expected a value")


def _braced(tokens: Tokens) -> str:
    """Read the text between braces, and return its tokens separated by spaces."""
    tokens.expect("{")
    words: list[str] = []
    depth = 1
    while True:
        token = tokens.take()
        if token.kind == "end":
            tokens.fail("expected '}'")
        depth += {"{": 1, "}": -1}.get(token.text if token.kind == "sign" else "", 0)
        if not depth:
            return " ".join(words)
        words.append(token.text)


# ---------------------------------------------------------------- printing


def written_options(options: Message, *, in_order: bool = False) -> list[str]:
    """Return ``name = value`` for each option that is set, except message-typed options and resolved extensions."""
    texts: list[str] = []
    for field, value in options.ListFields():
        if field.name == "uninterpreted_option":
            texts += [f"{_written_name(one)} = {_written_unknown(one)}" for one in value]
        elif field.type != FieldDescriptor.TYPE_MESSAGE and not field.is_extension:
            for one in value if field.is_repeated else [value]:
                texts.append(f"{field.name} = {_written_known(field, one)}")
    return sorted(texts) if in_order else texts


def _written_name(option: pb.UninterpretedOption) -> str:
    return ".".join(f"({part.name_part})" if part.is_extension else part.name_part for part in option.name)


def _written_unknown(option: pb.UninterpretedOption) -> str:
    if option.HasField("string_value"):
        return quoted(option.string_value)
    if option.HasField("aggregate_value"):
        return f"{{ {option.aggregate_value} }}"
    if option.HasField("identifier_value"):
        return str(option.identifier_value)
    if option.HasField("positive_int_value"):
        return str(option.positive_int_value)
    return str(option.negative_int_value if option.HasField("negative_int_value") else option.double_value)


def _written_known(field: FieldDescriptor, value: Any) -> str:
    if field.type == FieldDescriptor.TYPE_BOOL:
        return "true" if value else "false"
    if field.type == FieldDescriptor.TYPE_ENUM:
        return str(field.enum_type.values_by_number[value].name)
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return quoted(value.encode() if isinstance(value, str) else value)
    return str(value)


def quoted(data: bytes) -> str:
    """Return bytes as a quoted and escaped string literal."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return f'"{escaped(data)}"'
    return '"' + "".join(one if one.isprintable() and one not in '"\\' else escaped(one.encode()) for one in text) + '"'


def escaped(data: bytes) -> str:
    """Return bytes as text with C escapes. Protobuf stores the default of a bytes field in the same form."""
    return "".join(chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}" for byte in data)
