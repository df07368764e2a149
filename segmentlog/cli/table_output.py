"""Print results as tables on a terminal, as aligned text otherwise, or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from segmentlog.texts import in_line


def show_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Print rows under their columns; numbers are right-aligned."""
    drawn = sys.stdout.isatty()
    texts = [[_text(cell, grouped=drawn) for cell in row] for row in rows]
    right = [bool(rows) and all(isinstance(row[at], int | None) for row in rows) for at in range(len(columns))]
    if drawn:
        _draw(columns, texts, right, title)
        return
    if title:
        click.echo(title)
    widths = [max(len(line[at]) for line in [list(columns), *texts]) for at in range(len(columns))]
    for line in [[column.upper() for column in columns], *texts]:
        cells = [
            text.rjust(width) if flush else text.ljust(width)
            for text, width, flush in zip(line, widths, right, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def _draw(columns: Sequence[str], texts: list[list[str]], right: Sequence[bool], title: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column, flush in zip(columns, right, strict=True):
        table.add_column(column, justify="right" if flush else "left", overflow="fold")
    for line in texts:
        table.add_row(*map(Text, line))  # Text: do not interpret [brackets] in values as markup
    Console().print(table)


def _text(cell: object, *, grouped: bool) -> str:
    """Return a cell as one line without control characters; ``grouped`` adds thousands separators for people."""
    if cell is None:
        return "-"
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}" if grouped else str(cell)
    return in_line(str(cell))


def show_json(document: Any) -> None:
    """Print one JSON object on a line."""
    import msgspec

    click.echo(msgspec.json.encode(document).decode())
