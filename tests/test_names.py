"""Names explain themselves: no module, class, function or parameter has a name that `docs/style.md` rules out.

`tests/names_baseline.txt` lists the names that are still to be changed, and the number of places of each.
``python tests/test_names.py --rewrite`` removes the entries that are no longer needed. It adds nothing.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = ROOT / "segmentlog"
BASELINE: Final = Path(__file__).with_name("names_baseline.txt")
GENERATED: Final = ("generated",)
"""Folders of `segmentlog/server/codec` whose modules the generator writes."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MODULE_STOP_WORDS: Final = _words(
    "aborted alone arrivals attached child commits decided decisions entries faults files glance keeper kept known"
    " large later lazy machine mirrored names own pace parts places plain ranged reaches said served shared shipped"
    " site spans standing steps strand survey tails taken tidy tiered together told vectors whole_file witness words"
)
"""Adverbs, participles and words that do not say what a module is for."""
ING_NOUNS: Final = _words(
    "accounting binding coding decoding encoding finding formatting framing hashing logging parsing staging testing"
    " tiering tracing"
)
"""The last words of module names that end in -ing and are nouns; each other word in -ing is a verb."""
NAME_STOP_WORDS: Final = _words("begin forget keep look note one said settle some tell there told where")

Places = dict[str, list[str]]
"""Entry of the baseline -> the places that need it."""


def definitions(block: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the classes and functions in a block, also those inside others. Expressions are not searched."""
    for child in ast.iter_child_nodes(block):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from definitions(child)


def parameters(arguments: ast.arguments) -> list[ast.arg]:
    """Return all parameters of a function."""
    starred = [star for star in (arguments.vararg, arguments.kwarg) if star]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *starred]


def found(package: Path) -> Places:
    """Find the names in a package that need an entry in the baseline."""
    stems, classes, stopped = Places(), Places(), Places()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package.parent)
        if path.parent.parent.name == "codec" and path.parent.name in GENERATED:
            continue
        module = path.parent.name if path.stem == "__init__" else path.stem
        if module in MODULE_STOP_WORDS or (module.endswith("ing") and module.split("_")[-1] not in ING_NOUNS):
            stopped.setdefault(f"module {module}", []).append(f"{name}")
        if not path.stem.startswith("__"):
            stems.setdefault(f"repeated module {module}", []).append(f"{name}")
        inside = set[str]()
        for node in definitions(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name not in inside:
                inside.add(node.name)
                classes.setdefault(f"repeated class {node.name}", []).append(f"{name}:{node.lineno}")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name in NAME_STOP_WORDS:
                    stopped.setdefault(f"function {node.name}", []).append(f"{name}:{node.lineno}")
                for parameter in parameters(node.args):
                    if parameter.arg in NAME_STOP_WORDS:
                        stopped.setdefault(f"parameter {parameter.arg}", []).append(f"{name}:{parameter.lineno}")
    repeated = {entry: places for entry, places in (stems | classes).items() if len(places) > 1}
    return stopped | repeated


def read_baseline(text: str) -> dict[str, int]:
    """Read lines of an entry and the number of places that it allows. The lower of two numbers counts."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line]
    return {entry: int(count) for entry, count in sorted(lines, key=lambda line: -int(line[1]))}


def problems(places: Places, baseline: dict[str, int]) -> Iterator[str]:
    """Yield a message for each name that has too few or too many places allowed."""
    for entry in sorted({*places, *baseline}):
        now, allowed = len(places.get(entry, ())), baseline.get(entry, 0)
        if now > allowed:
            yield f"{entry}: {now} places, allowed {allowed}. Rename what you added: {', '.join(places[entry])}"
        elif now < allowed:
            change = (
                f"replace the line `{entry} {allowed}` by `{entry} {now}`" if now else f"remove `{entry} {allowed}`"
            )
            yield f"{entry}: {now} places, allowed {allowed}. In tests/{BASELINE.name}, {change}, {_OR_RUN}"


_OR_RUN: Final = "or run `python tests/test_names.py --rewrite`"


def shrunk(places: Places, baseline: dict[str, int]) -> str:
    """Return the baseline with the entries that are still needed, each count lowered to the places that exist."""
    counts = {entry: min(allowed, len(places.get(entry, ()))) for entry, allowed in baseline.items()}
    return "".join(f"{entry} {count}\n" for entry, count in sorted(counts.items()) if count)


def test_names_say_what_they_are() -> None:
    """The baseline has the names that are still to be changed, and nothing else."""
    text, places = BASELINE.read_text(), found(PACKAGE)
    complaints = list(problems(places, read_baseline(text)))
    assert not complaints, "\n".join(complaints)
    assert text == shrunk(places, read_baseline(text)), (
        f"sort tests/{BASELINE.name} and remove repeated lines, {_OR_RUN}"
    )


def test_a_name_that_says_nothing_is_found(tmp_path: Path) -> None:
    """The test finds modules, folders, nested classes, methods and parameters. It ignores variables and calls."""
    package = tmp_path / "package"
    for path, source in {
        "own/__init__.py": "",
        "a/known.py": "class Entry: pass\nclass Entry: pass\n",
        "a/sending.py": "def f(one, /, where, *some, there, **note): look = tell()\n",
        "b/known.py": "if True:\n    async def settle():\n        class Entry:\n            def look(self): pass\n",
        "b/encoding.py": "",
        "server/codec/generated/known.py": "class Entry: pass\n",
    }.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(source)
    assert found(package) == {
        "module own": ["package/own/__init__.py"],
        "module known": ["package/a/known.py", "package/b/known.py"],
        "module sending": ["package/a/sending.py"],
        "function settle": ["package/b/known.py:2"],
        "function look": ["package/b/known.py:4"],
        **{f"parameter {name}": ["package/a/sending.py:1"] for name in ("one", "where", "some", "there", "note")},
        "repeated module known": ["package/a/known.py", "package/b/known.py"],
        "repeated class Entry": ["package/a/known.py:1", "package/b/known.py:3"],
    }


def test_the_baseline_only_shrinks() -> None:
    """A new name and a further place are refused; so is an entry that is no longer needed, which --rewrite removes."""
    places = {
        "function tell": ["a.py:1", "b.py:2"],
        "repeated class Entry": ["a.py:3", "b.py:4"],
        "module own": ["own"],
    }
    baseline = {"function tell": 1, "repeated class Entry": 5, "parameter one": 2}
    assert [message.split(". ")[0] for message in problems(places, baseline)] == [
        "function tell: 2 places, allowed 1",
        "module own: 1 places, allowed 0",
        "parameter one: 0 places, allowed 2",
        "repeated class Entry: 2 places, allowed 5",
    ]
    assert shrunk(places, baseline) == "function tell 1\nrepeated class Entry 2\n"
    assert read_baseline("function tell 1\nfunction tell 2\n") == {"function tell": 1}


def pages() -> list[Path]:
    """Return the pages that describe the project as it is now."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def exists(path: str, page: Path) -> bool:
    """Return whether a page may name this file: from the root, from the package, from the tests or from itself."""
    return any((folder / path).exists() for folder in (ROOT, PACKAGE, ROOT / "tests", page.parent))


def is_defined(name: str) -> bool:
    """Return whether a dotted name is a module of the package, or a name in the source of one."""
    folder, *parts = ROOT, *name.split(".")
    while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    module = folder / "__init__.py"
    if parts and (folder / f"{parts[0]}.py").exists():
        module = folder / f"{parts.pop(0)}.py"
    if not parts:
        return True
    defined = r'\b(?:def|class) {0}\b|^\s*{0}\s*[:=,]|\bimport [^\n]*\b{0}\b|"{0}"'.format(re.escape(parts[0]))
    return module.exists() and re.search(defined, module.read_text(), re.MULTILINE) is not None


def dead(names: Iterable[str], page: Path) -> Iterator[str]:
    """Yield the paths and dotted names that no file has."""
    for name in names:
        if not (exists(name, page) if name.endswith(".py") else is_defined(name)):
            yield f"{page.relative_to(ROOT)}: `{name}` does not exist; write its new name"


def test_pages_name_files_and_modules_that_exist() -> None:
    """Paths such as `log/index.py`, and dotted names such as `segmentlog.log.index`."""
    complaints: list[str] = []
    for page in pages():
        names = set(re.findall(r"(?<![\w./:~-])(?:[\w-]+/)+[\w-]+\.py\b", page.read_text()))
        if page.parent.name != "ecosystem":  # those pages name settings of a cluster called segmentlog
            names |= set(re.findall(r"(?<![\w./@-])segmentlog(?:\.[A-Za-z_]\w*)+", page.read_text()))
        complaints += dead(sorted(names), page)
    assert not complaints, "\n".join(complaints)


def test_a_dead_name_is_found() -> None:
    """Files, modules and names in modules; what a package exports counts as its name."""
    names = [
        "log/no.py",
        "segmentlog.no",
        "segmentlog.errors.No",
        "segmentlog/errors.py",
        "segmentlog.open",
        "segmentlog.errors",
    ]
    assert [line.split("`")[1] for line in dead(names, ROOT / "README.md")] == names[:3]


if __name__ == "__main__":
    if sys.argv[1:] != ["--rewrite"]:
        sys.exit("usage: python tests/test_names.py --rewrite")
    BASELINE.write_text(shrunk(found(PACKAGE), read_baseline(BASELINE.read_text())))
