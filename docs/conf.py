"""How `make docs` builds the site: Sphinx over README.md and the pages in docs/."""

from __future__ import annotations

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

extensions = ["myst_parser"]
myst_heading_anchors = 4  # down to which headings a link may point

html_theme = "furo"
html_copy_source = False
html_show_copyright = False

smartquotes = False  # a "text" is typed as it stands here
