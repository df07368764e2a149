"""Decoders of msgspec's structs are created when a module is imported, in one thread.

msgspec 0.22 prepares a struct type when it is first decoded, and crashes the process if a second thread decodes it at
the same time. So no call names a struct type.
"""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "segmentlog"
BUILTINS = {"Any", "bytes", "dict", "float", "int", "list", "msgspec", "str", "tuple"}


def struct_calls(source: str) -> list[str]:
    """Return the calls ``msgspec....decode(..., type=T)`` in which T is more than built-in types."""
    found = []
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("msgspec.json.decode", "msgspec.msgpack.decode"):
            kinds = [*call.args[1:], *(keyword.value for keyword in call.keywords if keyword.arg == "type")]
            names = {node.id for kind in kinds for node in ast.walk(kind) if isinstance(node, ast.Name)}
            if names - BUILTINS - {"kind"}:
                found.append(f"line {call.lineno}: {ast.unparse(call)}")
    return found


def test_calls_are_recognized() -> None:
    """Structs are found in positions, keywords and inside other types; built-in types are allowed."""
    assert len(struct_calls("msgspec.json.decode(data, type=_File)\nmsgspec.msgpack.decode(x, type=list[a.B])")) == 2
    assert struct_calls("msgspec.json.decode(data, type=dict[str, Any] | None)\nmsgspec.json.decode(data)") == []
    assert struct_calls("msgspec.json.decode(x, type=str if kind == 'x' else bytes)") == []


def test_no_struct_is_prepared_by_a_call() -> None:
    """Write ``_decoder = msgspec.json.Decoder(T)`` below the struct, and call ``_decoder.decode``."""
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 300
    calls = {str(path.relative_to(PACKAGE)): struct_calls(path.read_text()) for path in paths}
    assert {path: found for path, found in calls.items() if found} == {}
