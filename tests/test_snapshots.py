"""Dictionaries and sets that threads share are copied before they are iterated.

`list(self._open.items())` is not a snapshot. It creates a tuple for each item, which may start the garbage collector
(up to Python 3.11), and the collector may run the finalizer of an unrelated object. If that finalizer closes a file, it
releases the GIL. Another thread may then insert, and the call raises "dictionary changed size during iteration".

`copy` creates no object for an item. A weak set is iterated in Python, also by its own `copy`, so `members_of` retries.

The rule has no list of exceptions. An iteration is right inside of `with` a lock, in a function whose name ends in
`_locked`, and over a copy.
"""

from __future__ import annotations

import ast
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from leftovers import opened
from logs import NoSyncFileSystem

import segmentlog
from segmentlog.store import LogStore
from segmentlog.weak_sets import members_of

PACKAGE: Final = Path(segmentlog.__file__).parent
SNAPSHOTS: Final = {"list", "tuple", "set", "frozenset", "dict"}
READERS: Final = SNAPSHOTS | {"sorted", "sum", "min", "max", "any", "all", "enumerate"}
VIEWS: Final = {"items", "values", "keys"}
HASHED: Final = {"dict", "set", "OrderedDict", "defaultdict", "WeakValueDictionary", "Counter"}
CHANGES: Final = {"add", "discard", "remove", "pop", "popitem", "update", "setdefault", "clear", "move_to_end"}
LOCK_WORDS: Final = ("lock", "mutex", "condition", "changed", "held", "ended", "awake", "told")

# ---------------------------------------------------------------- the rule


@cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return all nodes of a module or a class."""
    return tuple(ast.walk(tree))


def name_of(node: ast.AST | None) -> str:
    """Return the last word of a name or an attribute."""
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class Binding:
    """A name that is bound to something: an attribute of ``self``, or a variable of the module."""

    def __init__(self, target: ast.expr, annotation: ast.expr | None, value: ast.expr | None) -> None:
        self.name = name_of(target)
        self.is_own = isinstance(target, ast.Attribute) and name_of(target.value) == "self"
        kinds = {name_of(annotation), name_of(value.func) if isinstance(value, ast.Call) else ""}
        is_literal = isinstance(value, ast.Dict | ast.DictComp | ast.Set | ast.SetComp)
        self.is_weak = "WeakSet" in kinds
        self.is_hashed = is_literal or bool(kinds & HASHED)


@cache
def bindings_of(tree: ast.AST) -> tuple[Binding, ...]:
    """Return the names that a module or a class binds, with annotations and values."""
    found = []
    for node in nodes_of(tree):
        if isinstance(node, ast.AnnAssign):
            found.append(Binding(node.target, node.annotation, node.value))
        elif isinstance(node, ast.Assign):
            found += [Binding(target, None, node.value) for target in node.targets]
    return tuple(found)


def changed_names(tree: ast.AST) -> set[str]:
    """Return the names of what grows or shrinks somewhere."""
    found = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            found.add(name_of(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            found.add(name_of(node.func.value))
        elif isinstance(node, ast.AugAssign):
            found.add(name_of(node.target))
    return found


def other_names(tree: ast.AST) -> set[str]:
    """Return the attributes that may be something else: of ``self``, fields of structs, properties."""
    found = {one.name for one in bindings_of(tree) if one.is_own and not one.is_hashed}
    for node in nodes_of(tree):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    found.add(part.name)
                elif (
                    isinstance(part, ast.AnnAssign) and not Binding(part.target, part.annotation, part.value).is_hashed
                ):
                    found.add(name_of(part.target))
    return found


@cache
def is_lock(node: ast.With) -> bool:
    """Return whether it holds a lock that keeps other threads out; `folder_locked` is a shared lock."""
    words = " ".join(ast.unparse(item.context_expr) for item in node.items).lower().replace("folder_locked", "")
    return any(word in words for word in LOCK_WORDS)


class Names:
    """The dictionaries and sets of a package, by the names of attributes."""

    def __init__(self, trees: list[ast.Module]) -> None:
        bound = [one for tree in trees for one in bindings_of(tree)]
        self.changed = set[str]().union(*map(changed_names, trees))
        self.hashed = {one.name for one in bound if one.is_own and one.is_hashed and one.name in self.changed}
        """Attributes that are one in some class: their views are certainly."""
        self.known = self.hashed.difference(*map(other_names, trees))
        """Names that are a dictionary or a set in each class."""


class Iterations(ast.NodeVisitor):
    """Finds iterations outside of locks, in a class or in what a module has beside its classes.

    Any iteration of an attribute of ``self`` in a class that has a lock, and all snapshots.
    """

    def __init__(self, names: Names, node: ast.Module | ast.ClassDef) -> None:
        self._names = names
        own = {one.name for one in bindings_of(node) if one.is_own and one.is_hashed and one.name in names.changed}
        has_lock = any(isinstance(part, ast.With) and is_lock(part) for part in nodes_of(node))
        is_class = isinstance(node, ast.ClassDef)
        self._own, self._shared = own if is_class else set(), own if is_class and has_lock else set()
        self.variables: set[str] = set()
        """Dictionaries and sets of the module."""
        self.weak: set[str] = set()
        """Weak sets of the module, variables or attributes."""
        self.found: dict[int, str] = {}
        self._locks = 0

    def visit_With(self, node: ast.With) -> None:
        self._locks += is_lock(node)
        self.generic_visit(node)
        self._locks -= is_lock(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outside, self._locks = self._locks, int(node.name.endswith("_locked"))
        self.generic_visit(node)
        self._locks = outside

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Skip the class: it has other attributes."""

    def visit_Call(self, node: ast.Call) -> None:
        reader = node.func.id if isinstance(node.func, ast.Name) else ""
        if reader in READERS and node.args:
            self._look(node.args[0], is_snapshot=reader in SNAPSHOTS)
        self.generic_visit(node)

    def visit_Starred(self, node: ast.Starred) -> None:
        self._look(node.value, is_snapshot=isinstance(node.ctx, ast.Load))
        self.generic_visit(node)

    def visit_For(self, node: ast.For | ast.comprehension) -> None:
        self._look(node.iter, is_snapshot=False)
        self.generic_visit(node)

    visit_comprehension = visit_For

    def _look(self, node: ast.expr, *, is_snapshot: bool) -> None:
        if not self._locks and self._is_wrong(node, is_snapshot=is_snapshot):
            self.found[node.lineno] = ast.unparse(node)

    def _is_wrong(self, node: ast.expr, *, is_snapshot: bool) -> bool:
        method = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        if name_of(node) in self.weak or (method is not None and name_of(method.value) in self.weak):
            return True
        read, known = node, self._names.known
        if method is not None and method.attr in VIEWS:
            read, known = method.value, self._names.hashed
        if isinstance(read, ast.Name):
            return is_snapshot and read.id in self.variables
        if not isinstance(read, ast.Attribute):
            return False
        if name_of(read.value) == "self" and read.attr in (self._own if is_snapshot else self._shared):
            return True
        return read.attr in self._shared if name_of(read.value) == "self" else is_snapshot and read.attr in known


def uncopied(texts: dict[str, str]) -> list[str]:
    """Return where the modules of a package iterate what they should copy first."""
    # A million nodes are created and none is garbage, but the collector would go through them again and again. Nodes
    # that stayed in the caches would slow down every later collection of this process.
    gc.disable()
    try:
        return find_uncopied(texts)
    finally:
        for cached in (nodes_of, bindings_of, is_lock):
            cached.cache_clear()
        gc.enable()


def find_uncopied(texts: dict[str, str]) -> list[str]:
    """Return the same as `uncopied`, and leave the caches filled."""
    trees = {path: ast.parse(text) for path, text in sorted(texts.items())}
    names = Names(list(trees.values()))
    found: dict[tuple[str, int], str] = {}
    for path, tree in trees.items():
        variables = {
            name_of(node.target)
            for node in tree.body
            if isinstance(node, ast.AnnAssign) and Binding(node.target, node.annotation, node.value).is_hashed
        }
        classes = [node for node in nodes_of(tree) if isinstance(node, ast.ClassDef)]
        for node in (tree, *classes):
            look = Iterations(names, node)
            look.variables = variables & names.changed
            look.weak = {one.name for one in bindings_of(tree) if one.is_weak}
            look.generic_visit(node)
            found |= {(path, line): what for line, what in look.found.items()}
    return [f"{path}:{line}: {what}: copy it first" for (path, line), what in sorted(found.items())]


def test_what_threads_share_is_copied_before_it_is_iterated() -> None:
    """Everywhere in the package: a snapshot of an attribute, and any iteration in a class that has a lock."""
    paths = list(PACKAGE.rglob("*.py"))
    assert len(paths) > 300
    wrong = uncopied({str(path.relative_to(PACKAGE.parent)): path.read_text() for path in paths})
    assert not wrong, "\n".join(wrong)


_MODULE: Final = """
import threading, weakref
_known: dict[int, int] = {{}}
_alive: weakref.WeakSet[object] = weakref.WeakSet()

class Shared:
    def __init__(self):
        self._mutex = threading.Lock()
        self._open: dict[str, int] = {{}}
        self._names = set()
        self.fixed = (1, 2)

    def change(self):
        with self._mutex:
            self._open["a"] = 1
            self._names.add("a")
            _known[1] = 1

    def {name}(self, other):
        {body}
"""


@pytest.mark.parametrize(
    ("body", "is_right"),
    [
        ("return list(self._open.items())", False),
        ("return list(self._open.values())", False),
        ("return list(self._open)", False),
        ("return sorted(self._names)", False),
        ("return [*self._names]", False),
        ("return sum(self._open.values())", False),
        ("return dict(self._open)", False),
        ("return [key for key in self._open]", False),
        ("return any(one for one in self._open.values())", False),
        ("for one in self._names: print(one)", False),
        ("return list(other._open.items())", False),
        ("return list(other._names)", False),
        ("return list(_known)", False),
        ("return list(_alive)", False),
        ("return list(_alive.copy())", False),
        ("for one in _alive: print(one)", False),
        ("return list(self._open.copy().items())", True),
        ("return [key for key in self._open.copy()]", True),
        ("return sorted(self._names.copy())", True),
        ("return self._open.copy()", True),
        ("return tuple(self.fixed)", True),
        ("with self._mutex: return list(self._open.items())", True),
        ("return list(_known.copy())", True),
        ("return members_of(_alive)", True),
        ("names = {}; return list(names.items())", True),
    ],
)
def test_the_rule(body: str, is_right: bool) -> None:
    """Each kind of iteration is checked, with and without a lock."""
    assert (not uncopied({"module.py": _MODULE.format(name="look", body=body)})) == is_right
    assert not uncopied({"module.py": _MODULE.format(name="look_locked", body=body)})


# ---------------------------------------------------------------- the collector in between


class Garbage:
    """Found by the collector, and by no reference count. Its finalizer acts, and leaves another one."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.itself, self.act = self, act

    def __del__(self) -> None:
        if gc.isenabled():
            self.act()
            Garbage(self.act)


@contextmanager
def collecting(act: Callable[[], None]) -> Iterator[None]:
    """Run the collector at each creation of an object, and call ``act`` in a finalizer."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()  # or it would go through all that is there already, each time
    Garbage(act)
    gc.set_threshold(1, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.disable()
        gc.collect()
        gc.enable()
        gc.unfreeze()


def test_the_collector_runs_in_between() -> None:
    """A finalizer acts while a list of items is made, where the collector runs inside of calls; never during a copy."""
    mapping = {number: str(number) for number in range(1000)}
    inserted = 0

    def insert() -> None:
        nonlocal inserted
        inserted += 1
        mapping[-inserted] = ""

    with collecting(insert):
        copies = [mapping.copy() for _ in range(5)]
        if sys.version_info < (3, 12):  # later versions collect between instructions alone
            with pytest.raises(RuntimeError, match="changed size"):
                list(mapping.items())
    assert inserted > 5
    assert len(copies[-1]) > 1000


@pytest.mark.parametrize("name", ["recovery_reports", "opened_partitions", "close_moved_partitions", "health"])
def test_partitions_are_opened_while_those_are_listed_that_are_open(tmp_path: Path, name: str) -> None:
    """Another thread, simulated by a finalizer, opens partitions during the listing.

    The listing shows the partitions that were open before.
    """
    store = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
    for log in store.create_topic("t", 20).partitions():
        log.append([b"a"])
    topics = store._topics
    partitions = topics._partitions
    partition = store.topic("t").partition(0)
    added: list[tuple[str, int]] = []

    def insert() -> None:
        added.append(("t", 1000 + len(added)))
        partitions[added[-1]] = partition

    with collecting(insert):
        found = getattr(topics, name)()
    assert added
    for key in added:
        del partitions[key]
    if found is not None and name != "health":
        assert len(found) >= 20
    store.close()


def test_a_weak_set_that_grows_is_read() -> None:
    """A member that comes meanwhile may or may not be there; the others are."""

    class Member:
        pass

    more: list[Member] = []

    class Growing(weakref.WeakSet[Member]):
        """Another thread adds one while it is iterated, three times."""

        def __iter__(self) -> Iterator[Member]:
            for member in super().__iter__():
                if len(more) < 3:
                    more.append(Member())
                    self.add(more[-1])
                yield member

    kept = [Member() for _ in range(100)]
    assert {*kept} <= {*members_of(Growing(kept))}
    assert len(more) == 3
