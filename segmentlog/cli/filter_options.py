"""The options of `consume` and `tail` that choose records: by key, value, JSON path and header."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import msgspec

from segmentlog.consuming.record_filter import RecordFilter
from segmentlog.errors import InvalidConfig

if TYPE_CHECKING:
    from segmentlog.store import LogStore

_Command = TypeVar("_Command", bound=Callable[..., Any])

_META: Final = "segmentlog.cli.filter_options"
_OPTIONS: Final = {
    "key": ("--key", "TEXT", "Only records with this key; write bytes as 0x00ff."),
    "key_prefix": ("--key-prefix", "TEXT", "Only records whose key starts with TEXT."),
    "value": ("--contains", "TEXT", "Only records whose value contains TEXT."),
    "path": ("--where", "PATH", 'Only records whose value has this JSON path, such as user.id, "user.id == 7",'
             ' "items[*].price > 9.5", "user.name ~ ann"; also looks into Avro, JSON Schema and Protobuf values.'),
    "header": ("--header", "NAME[=VALUE]", "Only records with this header."),
}  # fmt: skip


def filter_options(command: _Command) -> _Command:
    """Add the filter options to a command. `parse_filter` returns the filter that a user gave with them."""
    for name, (option, metavar, text) in reversed(_OPTIONS.items()):
        command = click.option(option, name, metavar=metavar, help=text, expose_value=False, callback=_store_value)(
            command
        )
    return command


def _store_value(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        assert param.name is not None
        ctx.meta.setdefault(_META, {})[param.name] = value


def parse_filter(ctx: click.Context) -> RecordFilter:
    """Return the filter that the options describe; a record must fit all of them. Raises UsageError."""
    given: dict[str, str] = ctx.meta.get(_META, {})
    for name in ("path", "header"):
        if not given.get(name, "any").strip():
            raise click.UsageError(f"{_OPTIONS[name][0]}: it must not be empty")
    try:
        found = RecordFilter.parse(
            key=given.get("key", ""), key_prefix=given.get("key_prefix", ""), value=given.get("value", ""),
            path=given.get("path", ""), header=given.get("header", ""),
        )  # fmt: skip
    except InvalidConfig as error:
        option = _OPTIONS["header" if error.key == "header" else "path"][0]
        raise click.UsageError(f"{option}: {error.value!r} is not valid: {error.accepted}") from None
    # In a web form an empty field matches everything; --key '' is the empty key.
    return msgspec.structs.replace(
        found, **{name: b"" for name in ("key", "key_prefix", "value") if given.get(name) == ""}
    )


def with_schemas(record_filter: RecordFilter, store: LogStore) -> RecordFilter:
    """Return a filter whose JSON path also looks into Avro, JSON Schema and Protobuf values of the store's registry."""
    if record_filter.path is None:
        return record_filter
    decoder: list[Callable[[str, bytes], Any]] = []

    def decode(topic: str, value: bytes) -> Any:
        if not decoder:  # import only if there is such a value
            from segmentlog.schemas.any_values import document_decoder

            decoder.append(document_decoder(store.schemas))
        return decoder[0](topic, value)

    return msgspec.structs.replace(record_filter, decode=decode)
