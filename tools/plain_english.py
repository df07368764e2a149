"""Check the English of the project: ``python tools/plain_english.py [PATH...]``. `docs/style.md` has the rules.

The check reads docstrings, comments, messages (of exceptions, loggers and warnings), help texts and Markdown. It
skips generated code, code blocks and doctests. Without paths it reads the project.

`english_limits.cfg` limits the findings of each package per 1,000 words. A package without a line has the limit 0.
"""

from __future__ import annotations

import ast
import configparser
import io
import math
import re
import sys
import tokenize
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
LIMITS: Final = Path(__file__).with_name("english_limits.cfg")
ENGLISH: Final = "findings per 1,000 words"
"""The section of the limits file."""
SLACK: Final = 1.0
"""How far a package may be below its limit, in findings per 1,000 words."""
LONGEST: Final = 30
"""Words in a sentence (rule W13)."""

_GENERATED: Final = (
    "segmentlog/server/codec/generated",
    "docs/api.md",
    "docs/errors.md",
)  # of docstrings, counted there
_LEVELS: Final = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log", "warn"})
_HELP: Final = frozenset({"help", "short_help", "epilog", "description"})
_DIRECTIVE: Final = re.compile(r"#\s*(?:fmt|type|noqa|ruff|pragma|---)")
_ITEM: Final = re.compile(r"\s*(?:[-*]|\d+\.)\s+")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\"(*@])")
_LINK: Final = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_CODE: Final = re.compile(r"`[^`]*`")
_NEGATIONS: Final = "no|not|none|never|nothing|nobody|neither|nor|cannot|without|unless"
_WHO_VERBS: Final = (
    "is has was had asks reads waits wants finds comes goes ships holds appends restores takes opens looks knows dies"
    " stands does missed lost breaks joins may must cannot"
)
_STORED_VERBS: Final = "lies? lay lying stands?"
_STORED_PLACES: Final = "there here behind in where with alone beside before"
_DELETED: Final = "it they which segments? files? folder map those others rest"


@dataclass(frozen=True)
class Rule:
    """A pattern that no sentence should match."""

    number: str
    meaning: str
    pattern: re.Pattern[str]
    allows_questions: bool = False

    def matches(self, sentence: str) -> bool:
        """Return whether the sentence breaks the rule."""
        return bool(self.pattern.search(sentence)) and not (self.allows_questions and sentence.endswith("?"))


def _any(words: str) -> str:
    """Return an expression that matches any of the words, which spaces separate."""
    return f"(?:{'|'.join(words.split())})"


def _rule(number: str, meaning: str, pattern: str, flags: int = 0, *, allows_questions: bool = False) -> Rule:
    return Rule(number, meaning, re.compile(pattern, flags), allows_questions)


RULES: Final = (
    _rule(
        "W01",
        "starts with What, Who, Whoever or Whatever: start with the actor",
        r"^(?:What|Who)(?:ever)?\b",
        allows_questions=True,
    ),
    _rule(
        "W02",
        "starts with Of, Those, That of, The one or The same: write a whole sentence",
        r"^(?:Of|Those|That of|The one|The same)\b",
    ),
    _rule(
        "W03",
        "'who' for 'whoever': name the process, client or caller",
        rf"(?:^|[,;:(] ?|\b{_any('for by of to than as')} )[Ww]ho {_any(_WHO_VERBS)}\b",
        allows_questions=True,
    ),
    _rule(
        "W04",
        "'told' or 'tells': name the channel (raise, return, log, report)",
        rf"\b{_any('is are was were be been and which that')} (?:not )?told\b(?! (?:to|that)\b)"
        r"|\btells (?:it all|of|the|how|which|what|where|why|them)\b",
    ),
    _rule(
        "W05",
        "'lies' or 'stands' for 'is stored'",
        rf"\b{_any(_STORED_VERBS)} {_any(_STORED_PLACES)}\b",
    ),
    _rule(
        "W06",
        "archaic or translated idiom",
        r"\b(?:anew|lest|thereof|whereof|for ever|ever more|likewise|nor is|be that|do away|beside it|of late|by and by"
        r"|see to (?:it|that|them)|at it\b(?! is)|made of it)\b",
        re.IGNORECASE,
    ),
    _rule(
        "W07",
        "'is no X' for 'is not an X'",
        rf"\b{_any('is are was were')} no (?!{_any('longer more need way reason such point limit one')}\b)[a-z-]+",
    ),
    _rule(
        "W08",
        "'so many' or 'so long' without 'as' or 'that': give the number or the name",
        rf"\bso {_any('many much long old often few')}\b(?! as| that|[^.]{{0,40}} that\b)",
    ),
    _rule(
        "W09",
        "'goes on' for 'continues', 'goes' for 'is deleted'",
        rf"\b{_any('go goes went gone')} on\b(?! to\b)"
        rf"|\b{_any(_DELETED)} (?:go|goes)\b(?! {_any('to through from into back on up by')}\b)",
    ),
    _rule(
        "W10",
        "'nobody' or 'somebody': name the process, client or caller",
        r"\b(?:(?:no|some|any|every)body|whoever)\b",
        re.IGNORECASE,
    ),
    _rule(
        "W11",
        "two negations in a clause",
        rf"\b(?:{_NEGATIONS}|un[a-z]+ed)\b[^.;:]*\b(?:{_NEGATIONS})\b",
        re.IGNORECASE,
    ),
    _rule(
        "W12",
        "'behind' or 'in front of' for 'after' or 'before'",
        r"\b(?:behind|in front of) (?!the (?:scenes|proxy|firewall|load))",
    ),
    Rule("W13", f"more than {LONGEST} words", re.compile(rf"^(?:\S+\s+){{{LONGEST}}}")),
)


@dataclass(frozen=True)
class Text:
    """A paragraph, a list item, a table cell, a comment or a message, and its first line in the file."""

    line: int
    text: str


@dataclass(frozen=True)
class Finding:
    """A sentence that breaks a rule."""

    path: Path
    line: int
    rule: Rule
    sentence: str


def sentences(text: str) -> list[str]:
    """Split a paragraph into sentences without Markdown's links and bold type. Single words are left out."""
    plain = _LINK.sub(r"\1", text).replace("**", "")
    return [sentence.strip() for sentence in _SENTENCE_END.split(plain) if len(sentence.split()) > 1]


def broken_rules(sentence: str) -> Iterator[Rule]:
    """Yield the rules that a sentence breaks. A code span counts as one word."""
    for rule in RULES:
        if rule.matches(_CODE.sub("x", sentence) if rule.number == "W13" else sentence):
            yield rule


def texts_of_markdown(source: str) -> Iterator[Text]:
    """Yield paragraphs, list items and table cells. Headings and code blocks are left out."""
    start, lines, in_code = 0, list[str](), False
    for number, line in enumerate([*source.split("\n"), ""], 1):
        fence = line.lstrip().startswith(("```", "~~~"))
        in_code ^= fence
        if in_code and not fence:
            continue
        row = line.startswith("|")
        item = _ITEM.match(line)
        ends = fence or row or line.startswith("#") or not line.strip()
        if lines and (ends or item):
            yield Text(start, " ".join(lines))
            lines = []
        if row:
            cells = (cell.strip() for cell in line.strip("|").split("|"))
            yield from (Text(number, cell) for cell in cells if cell.strip("-: "))
        elif not ends:
            start = start if lines else number
            lines.append(line[item.end() if item else 0 :].strip())


def top_section(changelog: str) -> str:
    """Return the changelog up to the end of its first section: older entries stay as they are."""
    headings = [match.start() for match in re.finditer("^## ", changelog, re.MULTILINE)]
    return changelog[: headings[1]] if len(headings) > 1 else changelog


def texts_of_python(source: str) -> Iterator[Text]:
    """Yield docstrings (those of attributes, too), comments, messages and help texts."""
    seen: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else []:
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and child.value not in seen:
                seen.add(child.value)
                if isinstance(child.value.value, str):
                    yield from _paragraphs(child.lineno, child.value.value)
        for expression in _message_expressions(node):
            for message, text in _strings(expression):
                if message not in seen:
                    seen.add(message)
                    yield from _paragraphs(message.lineno, text)
    yield from _comments(source)


def _paragraphs(line: int, text: str) -> Iterator[Text]:
    at = 0
    for gap in [*re.finditer(r"\n\s*\n", text), None]:
        paragraph = text[at : gap.start() if gap else None]
        if paragraph.strip() and not paragraph.lstrip().startswith(">>>"):
            yield Text(line + text.count("\n", 0, at), " ".join(paragraph.split()))
        at = gap.end() if gap else at


def _message_expressions(node: ast.AST) -> list[ast.expr]:
    """Return the expressions of a node whose strings a person reads."""
    if isinstance(node, ast.Raise):
        return [node.exc] if isinstance(node.exc, ast.Call) else []
    if not isinstance(node, ast.Call):
        return []
    match node.func:
        case ast.Attribute(attr=name) if name in _LEVELS:
            return node.args
        case ast.Attribute(attr="__init__", value=ast.Call(func=ast.Name(id="super"))):
            return node.args  # an exception that writes its own message
        case ast.Name(id=name) | ast.Attribute(attr=name) if name.endswith(("Error", "Exception")):
            return node.args
    return [keyword.value for keyword in node.keywords if keyword.arg in _HELP]


def _strings(node: ast.expr) -> Iterator[tuple[ast.expr, str]]:
    """Yield the strings in an expression, each with its node. A value that is filled in reads "x"."""
    text = _string(node)
    if text is not None:
        yield node, text
        return
    for child in ast.iter_child_nodes(node):
        for part in [child.value] if isinstance(child, ast.keyword) else [child]:
            if isinstance(part, ast.expr):
                yield from _strings(part)


def _string(node: ast.expr) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_string(value) or "x" for value in values)
        case ast.BinOp(left=left, op=ast.Mod()):
            return _string(left)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            before, after = _string(left), _string(right)
            return None if before is None and after is None else (before or "x") + (after or "x")
        case ast.Call(func=ast.Attribute(value=template, attr="format")):
            return _string(template)
    return None


def _comments(source: str) -> Iterator[Text]:
    """Yield comments; those on lines of their own, one below the other, are one text."""
    start, above, lines = 0, (0, 0), list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or _DIRECTIVE.match(token.string):
            continue
        line, column = token.start
        if lines and above != (line - 1, column):
            yield Text(start, " ".join(lines))
            lines = []
        start = start if lines else line
        above = (line, column) if not token.line[:column].strip() else (0, 0)
        lines.append(token.string.lstrip("# ").strip())
    if lines:
        yield Text(start, " ".join(lines))


def texts(path: Path) -> Iterator[Text]:
    """Yield what a person reads in a file: a Python module or a Markdown page. Raise `ValueError` for another file."""
    source = path.read_text()
    if path.suffix == ".md":
        yield from texts_of_markdown(top_section(source) if path.name == "CHANGELOG.md" else source)
        return
    try:
        yield from texts_of_python(source)
    except SyntaxError as error:
        raise ValueError(f"{path} must be Markdown (.md) or valid Python: {error}") from error


@dataclass(frozen=True)
class Reading:
    """The findings in a file, and the number of words that the check read."""

    findings: list[Finding]
    word_count: int


def read(path: Path) -> Reading:
    """Check a file; the findings are sorted by line."""
    found, words = [], 0
    for text in sorted(texts(path), key=lambda text: text.line):
        for sentence in sentences(text.text):
            words += len(sentence.split())
            found += [Finding(path, text.line, rule, sentence) for rule in broken_rules(sentence)]
    return Reading(found, words)


def files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the modules and pages among and below the paths, without generated code and reports of benchmarks."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.name
            if (file.suffix in (".py", ".md") or file == path) and not name.startswith((*_GENERATED, "bench/results/")):
                yield file


def package_of(path: Path) -> str:
    """Return the part of the project that a file counts in: the name of a line in the limits file."""
    folder, *rest = path.relative_to(ROOT).parts
    if folder == "segmentlog" and len(rest) > 1:
        return rest[0]
    if folder in ("tools", "bench"):
        return "tools+bench"
    if folder == "docs" or path.suffix == ".md":
        return "README+docs"
    return folder if folder == "tests" else "top-level modules"


def project_files() -> list[Path]:
    """Return the files of the project that the check reads."""
    folders = [ROOT / name for name in ("segmentlog", "pyspark_segmentlog", "tests", "tools", "bench", "docs")]
    return list(files([*filter(Path.is_dir, folders), *sorted(ROOT.glob("*.py")), *sorted(ROOT.glob("*.md"))]))


def english_figures(paths: Iterable[Path]) -> dict[str, float]:
    """Return the findings per 1,000 words of each package."""
    found, words = Counter[str](), Counter[str]()
    for path in paths:
        reading = read(path)
        found[package_of(path)] += len(reading.findings)
        words[package_of(path)] += reading.word_count
    return {package: 1000 * found[package] / words[package] for package in words if words[package]}


def rounded_up(figure: float) -> float:
    """Round up to one decimal place."""
    return math.ceil(round(figure * 10, 6)) / 10


Limits = dict[str, float]
"""Package -> highest figure."""


def read_limits(path: Path) -> Limits:
    """Read a limits file. Raise `ValueError` if it is not one."""
    parser = _parser()
    try:
        parser.read_string(path.read_text(), str(path))
        return {name: float(value) for name, value in parser.items(ENGLISH)}
    except (configparser.Error, ValueError) as error:
        raise ValueError(f"{path} is not a limits file: {error}") from error


def write_limits(path: Path, limits: Limits) -> None:
    """Write a limits file, sorted; limits of 0 are left out."""
    parser = _parser()
    parser[ENGLISH] = {name: f"{limit:g}" for name, limit in sorted(limits.items()) if limit}
    text = io.StringIO()
    parser.write(text)
    head = (
        "# The highest figure of each package. tools/plain_english.py --tighten lowers them; nothing raises them.\n\n"
    )
    path.write_text(head + text.getvalue().rstrip("\n") + "\n")


def _parser() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, delimiters="=")
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    return parser


def problems(figures: Limits, limits: Limits, file: Path) -> Iterator[str]:
    """Yield a message for each package with a figure above its limit, or too far below it."""
    for package in sorted({*figures, *limits}):
        figure, limit = rounded_up(figures.get(package, 0)), limits.get(package, 0)
        state = f"{package}: {figure:g} {ENGLISH}, limit {limit:g}"
        if figure > limit:
            yield f"{state}. `python tools/plain_english.py {_paths(package)}` lists them. {_remedy(limit, file)}"
        elif figure < limit - SLACK or (limit and not figure):
            yield f"{state}. Keep the gain: run `python tools/plain_english.py --tighten`, and commit {file}."


def _remedy(limit: float, file: Path) -> str:
    if limit:
        return "Rewrite what you added."
    return f"Rewrite them. If the package is an old one with a new name, rename its line in {file}."


def _paths(package: str) -> str:
    """Return the arguments of the command that lists the findings of a package."""
    return {
        "tools+bench": "tools bench",
        "README+docs": "*.md docs",
        "tests": "tests",
        "top-level modules": "*.py segmentlog/*.py pyspark_segmentlog",
    }.get(package, f"segmentlog/{package}")


def tightened(limits: Limits, figures: Limits) -> Limits:
    """Return the limits, each lowered to today's figure. Packages are not added."""
    return {package: min(limit, rounded_up(figures.get(package, 0))) for package, limit in limits.items()}


def _counts(paths: list[Path]) -> Iterator[str]:
    """Yield a line for each rule, one for the sum, and one for each package."""
    found = [finding for path in paths for finding in read(path).findings]
    by_rule = Counter(finding.rule for finding in found)
    for rule in RULES:
        yield f"{by_rule[rule]:6d}  {rule.number} {rule.meaning}"
    yield f"{len(found):6d}  findings"
    for package, figure in sorted(english_figures(path for path in paths if path.is_relative_to(ROOT)).items()):
        yield f"{figure:6.1f}  {ENGLISH}: {package}"


def _options(arguments: list[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH")
    parser.add_argument("--count", action="store_true", help="count the findings of each rule and each package")
    parser.add_argument(
        "--limits", type=Path, metavar="FILE", help="fail if a package exceeds its limit in FILE, or is far below it"
    )
    parser.add_argument(
        "--tighten", action="store_true", help=f"lower the limits in FILE (default: {LIMITS.name}) to today's figures"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the check. Return 1 for findings or a broken limit, and 2 for a file that cannot be read."""
    try:
        return _run(_options(arguments))
    except (OSError, ValueError) as error:
        print(f"plain English: {error}", file=sys.stderr)
        return 2


def _run(options: Namespace) -> int:
    if options.limits or options.tighten:
        path = options.limits or LIMITS
        limits, figures = read_limits(path), english_figures(project_files())
        if options.tighten:
            write_limits(path, tightened(limits, figures))
            return 0
        complaints = list(problems(figures, limits, path))
        print("\n".join(complaints or ["plain English: all packages keep their limits"]))
        return 1 if complaints else 0
    paths = list(files(path.resolve() for path in options.paths)) or project_files()
    if options.count:
        print("\n".join(_counts(paths)))
        return 0
    found = [finding for path in paths for finding in read(path).findings]
    for finding in found:
        name = finding.path.relative_to(Path.cwd()) if finding.path.is_relative_to(Path.cwd()) else finding.path
        print(f"{name}:{finding.line}: {finding.rule.number} {finding.sentence}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
