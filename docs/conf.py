"""How `make docs` makes the site: Sphinx over README.md, the pages in docs/ and the docstrings."""

from __future__ import annotations

import re
from textwrap import indent
from typing import Any, Final

from sphinx.application import Sphinx

import segmentlog

project = "segmentlog"
version = release = segmentlog.__version__
html_title = f"{project} {version}"

# The root of the site is that of the repository: links from page to page, and to any other file, are the same in both.
include_patterns = [
    "index.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/*.md",
    "docs/ecosystem/*.md",
    "bench/results/*/README.md",
]
exclude_patterns = [".*", "build"]

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4  # down to which headings a link may point

html_theme = "furo"
html_copy_source = False
html_show_copyright = False

smartquotes = False  # a "text" is typed as it stands here
default_role = "py:obj"  # what stands in `backticks` is a link if there is a name like it, and code if not
nitpicky = True  # a class that a docstring names is there, and has what it says; other names are not checked
nitpick_ignore_regex = [("py:class", ".*"), ("py:obj", r"[^A-Z].*|(Background|Clock)\..*")]

autodoc_default_options = {
    "members": True,
    "undoc-members": True,
    "member-order": "bysource",
    "exclude-members": "__init__, __new__",
}
autodoc_class_signature = "separated"  # most objects are got from others, and their classes not called
toc_object_entries_show_parents = "hide"

_ROW: Final = r"^(\S.*?) {2,}(\S.*(?:\n +.*)*)"


def _as_rest(text: str) -> str:
    """A docstring in the words of reST: columns of names and what they mean, one inside the other, are definitions."""
    blocks = text.strip("\n").split("\n\n")
    for number, block in enumerate(blocks):
        if re.fullmatch(rf"(?m:{_ROW}\n?)+", block):
            rows = [(name.strip("`"), re.sub("\n +", "\n", meaning)) for name, meaning in re.findall(_ROW, block, re.M)]
            blocks[number] = "\n\n".join(f"``{name}``\n{indent(_as_rest(meaning), '    ')}" for name, meaning in rows)
    return "\n\n".join(blocks) + "\n"


def _docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    text = re.sub("(?<!`)`(?=[A-Z])", "`.", "\n".join(lines))  # a class, wherever it is documented
    lines[:] = [] if text.startswith("Alias for field number") else _as_rest(text).splitlines()


def setup(app: Sphinx) -> None:
    """What Sphinx calls."""
    app.connect("autodoc-process-docstring", _docstring)
