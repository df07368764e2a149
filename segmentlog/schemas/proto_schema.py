"""Protobuf schemas: parsed by `proto_parser`, checked by Protobuf's descriptor pool, compared by `proto_diff`.

A schema is the text of a ``.proto`` file, or a serialized ``FileDescriptorProto`` in base64, which some clients send.
"""

from __future__ import annotations

import base64
import binascii
import importlib
from collections.abc import Sequence
from typing import Any, Final

from google.protobuf import descriptor_pb2 as pb
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.descriptor_pool import Default, DescriptorPool
from google.protobuf.message import DecodeError

from segmentlog.schemas.proto_parser import parse_file
from segmentlog.schemas.proto_printer import print_file
from segmentlog.schemas.registry_errors import InvalidSchema
from segmentlog.schemas.schema_kind import Dependency, ParsedSchema

FILE_NAME: Final = "default"
"""File name of the schema itself in the descriptor pool, because a registered schema has no file name."""
_BUILT_IN: Final = {
    "google/protobuf/": "google.protobuf",
    "google/type/": "google.type",  # from the package googleapis-common-protos, if it is installed
    "google/api/": "google.api",
    "google/rpc/": "google.rpc",
}


class ProtoSchema:
    """A parsed ``.proto`` file. Each import must be one of its references, or a file of Google."""

    def __init__(self, text: str, dependencies: Sequence[Dependency] = ()) -> None:
        self.pool = DescriptorPool()
        self._added: set[str] = set()
        files = {one.name: one.text for one in dependencies}
        self.file = self._add(_read(text, FILE_NAME), files)
        resolved = pb.FileDescriptorProto()
        self.file.CopyToProto(resolved)
        self.proto: pb.FileDescriptorProto = resolved
        """The file; every type in it has its full name."""
        self.canonical = print_file(resolved)

    def _add(
        self, file: pb.FileDescriptorProto, others: dict[str, str], within: tuple[str, ...] = ()
    ) -> FileDescriptor:
        """Add the imports of a file to the pool, then the file."""
        for name in file.dependency:
            if name in self._added:
                continue
            if name in within:
                raise InvalidSchema(f"Invalid Protobuf schema: {name} imports itself")
            if name in others:
                self._add(_read(others[name], name), others, (*within, name))
            else:
                self._add(_built_in(name), others, (*within, name))
        try:
            self.pool.AddSerializedFile(file.SerializeToString())
            found = self.pool.FindFileByName(file.name)
        except (TypeError, KeyError, ValueError) as error:
            why = str(error).removeprefix("Couldn't build proto file into descriptor pool: ")
            raise InvalidSchema(f"Invalid Protobuf schema: {why[:500]}") from None
        self._added.add(file.name)
        return found

    def normalized(self) -> str:
        return print_file(self.proto, in_order=True)

    def formatted(self, shape: str) -> str:
        if shape == "serialized":
            return base64.b64encode(self.proto.SerializeToString()).decode()
        return self.canonical

    def why_unreadable(self, written: ParsedSchema) -> list[str]:
        assert isinstance(written, ProtoSchema)
        from segmentlog.schemas.proto_diff import incompatible_changes

        return [
            f"{{errorType:'{kind}', description:'Found incompatible change: {kind} at path {place}'}}"
            for kind, place in incompatible_changes(written.file, self.file)
        ]

    # ------------------------------------------------------------ messages of the file

    def message(self, indexes: Sequence[int]) -> Descriptor:
        """Return a message by its indexes: ``[0, 2]`` is the third message nested in the first. Raises LookupError."""
        messages: Sequence[Descriptor] = list(self.file.message_types_by_name.values())
        found: Descriptor | None = None
        for index in indexes:
            if not 0 <= index < len(messages):
                raise LookupError(f"the schema has no message with indexes {list(indexes)}")
            found = messages[index]
            messages = found.nested_types
        if found is None:
            raise LookupError("the list of message indexes is empty")
        return found

    def find_message(self, full_name: str) -> Descriptor:
        """Return a message by its full name. Raises LookupError."""
        return self.pool.FindMessageTypeByName(full_name)


def indexes_of(message: Descriptor) -> list[int]:
    """Return the indexes of a message in its file, from the outermost message to the message itself."""
    outer = message.containing_type
    siblings: Sequence[Any] = list(message.file.message_types_by_name.values()) if outer is None else outer.nested_types
    index = [one.full_name for one in siblings].index(message.full_name)
    return [index] if outer is None else [*indexes_of(outer), index]


def _read(text: str, name: str) -> pb.FileDescriptorProto:
    try:
        data = base64.b64decode(text, validate=True)
        file = pb.FileDescriptorProto.FromString(data)
    except (binascii.Error, ValueError, DecodeError):
        file = None
    if file is None or not (file.message_type or file.enum_type or file.service or file.extension or file.dependency):
        return parse_file(text, name)
    file.name = name
    file.ClearField("source_code_info")
    return file


def is_built_in(name: str) -> bool:
    """Return whether a file is one of Google's, which need no reference."""
    return name.startswith(tuple(_BUILT_IN))


def _built_in(name: str) -> pb.FileDescriptorProto:
    for prefix, package in _BUILT_IN.items():
        stem = name.removeprefix(prefix).removesuffix(".proto")
        if name.startswith(prefix) and stem.isidentifier():
            try:
                importlib.import_module(f"{package}.{stem}_pb2")
                file = pb.FileDescriptorProto()
                Default().FindFileByName(name).CopyToProto(file)
            except (ImportError, KeyError):
                break
            return file
    raise InvalidSchema(f"Invalid Protobuf schema: import {name!r}: the schema has no reference with that name")
