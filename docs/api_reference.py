"""Markdown for the Python interface, from the sources: signatures, docstrings, and the texts below attributes.

`api_page` reads the syntax tree, so nothing is called, and every text is shown in the order of the source.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

import segmentlog

_LINE: Final = 100
"""Longer signatures are shown with one argument a line."""

_PAGE: Final = """\
# Python interface

For developers who look up a class, a method or an argument. The texts are the docstrings; `docs/api_reference.py`
makes this page from them. [python.md](python.md) shows how the parts work together, [config.md](config.md) has the
settings of a topic, and [errors.md](errors.md) every exception.

Names without a module can be imported from `segmentlog`.
"""

_SECTIONS: Final = {
    "Stores and topics": (
        "open",
        "LogStore",
        "Topic",
        "TopicConfig",
        "FsyncPolicy",
        "segmentlog.records.RecoveryMode",
        "RecoveryReport",
        "segmentlog.inspection.scrubber.ScrubReport",
        "segmentlog.inspection.scrubber.ScrubFinding",
    ),
    "Producing": (
        "Producer",
        "Delivery",
        "Appended",
        "HashPartitioner",
        "RangePartitioner",
        "ProducerStamp",
    ),
    "Consuming": (
        "Consumer",
        "Record",
        "RecordBatch",
        "TopicPartition",
        "CommittedOffset",
        "segmentlog.groups.group_admin.Groups",
        "GroupDescription",
        "segmentlog.groups.group_admin.MemberDescription",
        "segmentlog.groups.group_admin.PartitionDescription",
    ),
    "In asyncio": (
        "AsyncProducer",
        "AsyncDelivery",
        "segmentlog.producing.async_sender.AsyncDeliveries",
        "AsyncConsumer",
    ),
    "Objects in place of bytes": (
        "Serializer",
        "Deserializer",
        "json_codec",
        "msgpack_codec",
        "text_codec",
        "Codec",
        "Undecodable",
    ),
    "Schemas": (
        "segmentlog.schemas.registry.SchemaRegistry",
        "segmentlog.schemas.parsed_schemas.Draft",
        "segmentlog.schemas.registry_records.SchemaRecord",
        "segmentlog.schemas.registry_records.Reference",
        "segmentlog.schemas.remote_registry.RemoteRegistry",
        "segmentlog.schemas.avro_values.AvroSerializer",
        "segmentlog.schemas.avro_values.AvroDeserializer",
        "segmentlog.schemas.json_values.JsonSerializer",
        "segmentlog.schemas.json_values.JsonDeserializer",
        "segmentlog.schemas.proto_values.ProtobufSerializer",
        "segmentlog.schemas.proto_values.ProtobufDeserializer",
        "segmentlog.schemas.any_values.AnyDeserializer",
        "segmentlog.spark.avro.from_avro",
    ),
    "Partitions": (
        "Partition",
        "WireAppended",
        "SegmentInfo",
        "EpochStart",
        "LostRange",
        "RetentionReport",
        "CompactionReport",
    ),
    "Copies elsewhere": (
        "replica",
        "Replica",
        "segmentlog.objects.replica.replica.ReplicaStatus",
        "restore",
        "segmentlog.objects.restore.restore.Restored",
        "open_bucket",
    ),
    "A server for Kafka's clients": (
        "serve",
        "Server",
    ),
    "Logging": (
        "LogHandler",
        "segmentlog.logs.log_record_json.render",
    ),
    "Traces": (
        "segmentlog.tracing.Tracing",
        "segmentlog.tracing.context_of",
        "segmentlog.tracing.link_of",
        "segmentlog.tracing.processing",
        "segmentlog.tracing.processing_many",
    ),
    "Tables": ("Table",),
}
"""Every public name but the exceptions, by section; a path for those that the package does not export."""

_ROW: Final = re.compile(r"^(\S.*?) {2,}(\S.*(?:\n +.*)*)", re.MULTILINE)
_ROWS: Final = re.compile(r"(?:^\S.*? {2,}\S.*(?:\n +.*)*\n?)+", re.MULTILINE)


def api_page() -> str:
    """Return the whole page. Fails when the package exports a name that no section has."""
    listed = {path.rpartition(".")[2] for paths in _SECTIONS.values() for path in paths}
    missing = {name for name in segmentlog.__all__ if name not in listed and not _is_error(name)}
    assert not missing, f"_SECTIONS lacks {missing}"
    parts = [_PAGE]
    for section, paths in _SECTIONS.items():
        parts += [f"## {section}\n", *(entry(path) for path in paths)]
        if section == "Schemas":
            parts.append(_schema_errors())
    return "\n".join(parts)


def _is_error(name: str) -> bool:
    found = getattr(segmentlog, name)
    return isinstance(found, type) and issubclass(found, Exception)


def _schema_errors() -> str:
    """Return a table of the exceptions of the schema registry."""
    rows = [
        "### Errors of the schema registry",
        "",
        "| exception in `segmentlog.schemas.registry_errors` | meaning |",
        "|---|---|",
    ]
    for node in _body(importlib.import_module("segmentlog.schemas.registry_errors")):
        if isinstance(node, ast.ClassDef):
            rows.append(f"| `{node.name}` | {markdown(ast.get_docstring(node)).replace(chr(10), ' ')} |")
    return "\n".join(rows) + "\n"


def entry(path: str) -> str:
    """Return the section of a function, a class or a constant: its heading, signature, text and members."""
    module, name = _home(path)
    node = _find(module, name)
    if isinstance(node, ast.FunctionDef):
        prefix = "segmentlog." if module is segmentlog else ""
        return f"### {prefix}{name}\n\n{_signature(node, prefix)}\n\n{markdown(ast.get_docstring(node))}\n"
    if isinstance(node, ast.ClassDef):
        return _class(module, node)
    value = (
        ast.unparse(node.value).replace("'", '"') if isinstance(node, ast.Assign | ast.AnnAssign) and node.value else ""
    )
    return f"### {name}\n\n```python\n{name} = {value}\n```\n\n{markdown(_text_below(module, node))}\n"


def _home(path: str) -> tuple[ModuleType, str]:
    module, _, name = path.rpartition(".")
    if module:
        return importlib.import_module(module), name
    found = getattr(segmentlog, name)
    if isinstance(found, type):
        return importlib.import_module(found.__module__), name
    return importlib.import_module(found.__module__), name


def _body(module: ModuleType) -> list[ast.stmt]:
    assert module.__file__ is not None
    return ast.parse(Path(module.__file__).read_text()).body


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _find(module: ModuleType, name: str) -> ast.stmt:
    found = [node for node in _body(module) if name in _names(node) and not _is_overload(node)]
    assert found, f"{module.__name__} has no {name}"
    return found[-1]


def _text_below(module: ModuleType, wanted: ast.stmt) -> str | None:
    body = _body(module)
    for node, following in itertools.pairwise(body):
        if _names(node) == _names(wanted):
            return _text(following)
    return None


def _text(node: ast.stmt | None) -> str | None:
    """Return the text of an expression that is nothing but a text."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return inspect.cleandoc(node.value.value)
    return None


def _class(module: ModuleType, node: ast.ClassDef) -> str:
    kind = getattr(module, node.name)
    bases = [base.__name__ for base in kind.__mro__[1:] if base.__name__ in segmentlog.__all__]
    about = f"Base class: {', '.join(f'[`{base}`](#{base.lower()})' for base in bases)}.\n\n" if bases else ""
    parts = [f"### {node.name}\n\n{about}{markdown(ast.get_docstring(node))}\n"]
    shown: set[str] = set()
    for name, text in _members(node):
        shown.add(name)
        parts.append(text)
    for base in kind.__mro__[1:]:
        if base.__module__.startswith("segmentlog.") and base.__name__ not in segmentlog.__all__:
            inherited = _find(importlib.import_module(base.__module__), base.__name__)
            assert isinstance(inherited, ast.ClassDef)
            for name, text in _members(inherited):
                if name not in shown:
                    shown.add(name)
                    parts.append(text)
    return "\n".join(parts)


def _members(kind: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the public attributes and methods that have a text, in the order of the source."""
    for node, following in zip(kind.body, [*kind.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == "__init__":
                yield from _attributes_of_init(node)
            text = ast.get_docstring(node)
            if node.name.startswith("_") or text is None or _is_overload(node):
                continue
            decorators = [ast.unparse(one) for one in node.decorator_list]
            if "property" in decorators or "cached_property" in decorators:
                returns = f": {ast.unparse(node.returns)}" if node.returns else ""
                yield node.name, _attribute(f"{node.name}{returns}", text)
            else:
                yield node.name, f"{_signature(node, f'{kind.name}.')}\n\n{markdown(text)}\n"
        elif isinstance(node, ast.AnnAssign) and not _names(node)[0].startswith("_"):
            name = _names(node)[0]
            default = f" = {ast.unparse(node.value)}" if node.value else ""
            yield name, _attribute(f"{name}: {ast.unparse(node.annotation)}{default}", _text(following))


def _attributes_of_init(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, str]]:
    for assigned, following in zip(node.body, node.body[1:], strict=False):
        text = _text(following)
        target = assigned.targets[0] if isinstance(assigned, ast.Assign) else getattr(assigned, "target", None)
        if text and isinstance(target, ast.Attribute) and not target.attr.startswith("_"):
            kind = f": {ast.unparse(assigned.annotation)}" if isinstance(assigned, ast.AnnAssign) else ""
            yield target.attr, _attribute(f"{target.attr}{kind}", text)


def _attribute(name: str, text: str | None) -> str:
    return f"**`{name}`**\n\n{markdown(text)}\n" if text else f"**`{name}`**\n"


def _is_overload(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any("overload" in ast.unparse(one) for one in node.decorator_list)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, prefix: str) -> str:
    """Return a call with its arguments and result as a block of code; ``self`` and ``cls`` are left out."""
    arguments = node.args
    is_static = any(ast.unparse(one) == "staticmethod" for one in node.decorator_list)
    if prefix and prefix != "segmentlog." and not is_static:
        (arguments.posonlyargs or arguments.args).pop(0)
    start = f"{'async ' if isinstance(node, ast.AsyncFunctionDef) else ''}{prefix}{node.name}"
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{start}({ast.unparse(arguments)}){result}"
    if len(line) > _LINE:
        pieces = "".join(f"    {piece},\n" for piece in _pieces(arguments))
        line = f"{start}(\n{pieces}){result}"
    return f"```python\n{line}\n```"


def _pieces(arguments: ast.arguments) -> list[str]:
    """Return the arguments one by one, with the bare star."""
    text, pieces, depth = ast.unparse(arguments), [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return [piece.strip() for piece in pieces]


def markdown(text: str | None) -> str:
    """Return a docstring as Markdown: columns of names become lists, double backticks single ones."""
    blocks = []
    for block in (text or "").split("\n\n"):
        if block.startswith("    "):
            blocks.append(f"```python\n{textwrap.dedent(block)}\n```")
            continue
        if _ROWS.fullmatch(block):
            rows = [(name.strip("`"), re.sub("\n +", " ", meaning)) for name, meaning in _ROW.findall(block)]
            block = "\n".join(f"- {_names_of(name)}: {meaning}" for name, meaning in rows)
        block = re.sub(r"``docs/([\w-]+\.md)``|(?<!`)`docs/([\w-]+\.md)`(?!`)", r"[\1\2](\1\2)", block)
        block = re.sub(r"``(.+?)``", r"`\1`", block, flags=re.DOTALL)
        blocks.append(re.sub(r"(?<!`)`\.?([\w.]+)`(?!`)", _code, block))
    return "\n\n".join(blocks).strip()


def _names_of(text: str) -> str:
    return ", ".join(f"`{name}`" for name in text.split(", "))


def _code(found: re.Match[str]) -> str:
    """Link a name of the interface to its section, and leave other code as it is."""
    name = found[1]
    first = name.partition(".")[0]
    if first not in segmentlog.__all__ or not first[0].isupper():
        return f"`{name}`"
    page = "errors.md" if issubclass(getattr(segmentlog, first), Exception) else ""
    return f"[`{name}`]({page}#{first.lower()})"
