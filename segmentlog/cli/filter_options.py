"""The options of `consume` and `tail` that choose records: by key, value, JSON path and header."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import msgspec

from segmentlog.consuming.record_filter import Filter
from segmentlog.errors import InvalidConfig

if TYPE_CHECKING:
    from segmentlog.store import LogStore

_Command = TypeVar("_Command", bound=Callable[..., Any])

_META: Final = "segmentlog.cli.filter_options"
_OPTIONS: Final = {
    "key": ("--key", "TEXT", "Only records with this key; 0x00ff for bytes."),
    "key_prefix": ("--key-prefix", "TEXT", "Only records whose key begins with this."),
    "value": ("--contains", "TEXT", "Only records whose value has this somewhere in it."),
    "path": ("--where", "PATH", 'Only records whose value has this JSON path, as in user.id, "user.id == 7",'
             ' "items[*].price > 9.5", "user.name ~ ann"; also looks into Avro, JSON Schema and Protobuf values.'),
    "header": ("--header", "NAME[=VALUE]", "Only records with this header."),
}  # fmt: skip


def filter_options(command: _Command) -> _Command:
    """Give a command the options; `filter_of` has what was given."""
    for name, (option, metavar, text) in reversed(_OPTIONS.items()):
        command = click.option(option, name, metavar=metavar, help=text, expose_value=False, callback=_note)(command)
    return command


def _note(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        assert param.name is not None
        ctx.meta.setdefault(_META, {})[param.name] = value


def filter_of(ctx: click.Context) -> Filter:
    """Return the filter that the options describe; a record must fit all of them. Raises UsageError."""
    given: dict[str, str] = ctx.meta.get(_META, {})
    for name in ("path", "header"):
        if not given.get(name, "any").strip():
            raise click.UsageError(f"{_OPTIONS[name][0]}: it is empty")
    try:
        found = Filter.parse(
            key=given.get("key", ""), key_prefix=given.get("key_prefix", ""), value=given.get("value", ""),
            path=given.get("path", ""), header=given.get("header", ""),
        )  # fmt: skip
    except InvalidConfig as error:
        option = _OPTIONS["header" if error.key == "header" else "path"][0]
        raise click.UsageError(f"{option}: {error.value!r} is not valid: {error.accepted}") from None
    # In a form an empty field is everything; --key '' is the empty key.
    return msgspec.structs.replace(
        found, **{name: b"" for name in ("key", "key_prefix", "value") if given.get(name) == ""}
    )


def with_schemas(wanted: Filter, store: LogStore) -> Filter:
    """Return a filter whose JSON path also looks into Avro, JSON Schema and Protobuf values of the store's registry."""
    if wanted.path is None:
        return wanted
    decoder: list[Callable[[str, bytes], Any]] = []

    def decode(topic: str, value: bytes) -> Any:
        if not decoder:  # imported only if there is such a value
            from segmentlog.schemas.any_values import document_decoder

            decoder.append(document_decoder(store.schemas))
        return decoder[0](topic, value)

    return msgspec.structs.replace(wanted, decode=decode)
