"""Check every use of `interrupt_safe_context` against its rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import segmentlog

PACKAGE = Path(segmentlog.__file__).parent


def _decorators(function: ast.FunctionDef) -> set[str]:
    return {getattr(one, "id", getattr(one, "attr", "")) for one in function.decorator_list}


def _functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield path.relative_to(PACKAGE).as_posix(), node


def _called(context: ast.expr) -> str:
    of = context.func if isinstance(context, ast.Call) else context
    return getattr(of, "id", getattr(of, "attr", ""))


def _deaf(function: ast.FunctionDef, hears: set[str]) -> Iterator[int]:
    """Yield the lines that handle an error in the body of a context that gets no errors."""

    def yields(nodes: list[ast.stmt]) -> bool:
        return any(isinstance(inner, ast.Yield) for node in nodes for inner in ast.walk(node))

    for node in ast.walk(function):
        if isinstance(node, ast.Try) and node.handlers and yields(node.body):
            yield node.lineno
        elif isinstance(node, ast.With) and yields(node.body):
            yield from (node.lineno for item in node.items if _called(item.context_expr) in hears)


_FOUND = """
@interrupt_safe_context
def lock(self):
    with self.translating_errors(), self.mutex:
        try:
            yield
        except OSError:
            raise RuntimeError
        finally:
            pass

@interrupt_safe_context
def quiet(self):
    with suppress(OSError):
        yield
"""


def test_contexts_that_are_told_of_no_error_ask_for_none() -> None:
    """No generator of `interrupt_safe_context` has an ``except`` around its ``yield``: that would never run.

    Such a generator sees `GeneratorExit`, however its body ended. For the same reason no context of `contextlib` may
    surround the ``yield``.
    """
    assert [len(list(_deaf(node, {"translating_errors", "suppress"}))) for node in ast.parse(_FOUND).body] == [2, 1]  # type: ignore[arg-type]
    functions = list(_functions())
    hears = {one.name for _, one in functions if "contextmanager" in _decorators(one)} | {"suppress"}
    assert "translating_errors" in hears
    held = [(name, one) for name, one in functions if "interrupt_safe_context" in _decorators(one)]
    hears -= {one.name for _, one in held}  # where two have one name
    assert len(held) > 10
    assert not [f"{name}:{line}" for name, one in held for line in _deaf(one, hears)]
