"""Options and table of ``segmentlog compact --stats``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from segmentlog.cli.table_output import show_json, show_table

if TYPE_CHECKING:
    from segmentlog.tables.key_statistics import GroupName, GroupOf, KeyGroup


def choose_grouping(separator: str | None, length: int | None) -> GroupOf:
    """Return the function that maps a key to its group: the prefix before ``separator``, or of ``length`` bytes.

    Raises UsageError if both are given, or if the separator is empty.
    """
    from segmentlog.tables.key_statistics import group_by_length, group_by_separator

    if separator is not None and length is not None:
        raise click.UsageError("--prefix-separator and --prefix-length exclude each other")
    if length is not None:
        return group_by_length(length)
    if separator == "":
        raise click.UsageError("--prefix-separator: at least one character")
    return group_by_separator((":" if separator is None else separator).encode())


def show_groups(
    topic: str, groups: dict[GroupName, KeyGroup], total: KeyGroup, rows: int, as_json: bool,
    unreadable: int = 0,
) -> None:  # fmt: skip
    """Print the ``rows`` groups that compaction would shrink most, the total of all, and the ``unreadable`` batches."""
    ordered = sorted(groups.items(), key=lambda item: (-item[1].removed_bytes, -item[1].records, str(item[0])))
    if as_json:
        for name, group in ordered[:rows]:
            show_json({"topic": topic, "prefix": _text(name), "total": False, **_fields(group)})
        show_json({"topic": topic, "prefix": None, "total": True, **_fields(total), "unreadable_batches": unreadable})
        return
    table = [(_text(name), *_cells(group)) for name, group in ordered[:rows]]
    hidden = f" (and {len(groups) - rows:,} more prefixes)" if len(groups) > rows else ""
    show_table(
        (
            "prefix",
            "records",
            "would be kept",
            "tombstones",
            "would be removed",
            "bytes",
            "bytes that would be removed",
        ),
        [*table, (f"all{hidden}", *_cells(total))],
        f"{topic}: what a pass would remove; sizes before compression",
    )


def _text(name: GroupName) -> str:
    """Return the name of a group of keys as text.

    Escapes invalid UTF-8 and all unprintable characters, some of which would move the cursor of a terminal.
    """
    text = name if isinstance(name, str) else name.decode(errors="backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _cells(group: KeyGroup) -> tuple[int, ...]:
    removed = group.records - group.kept
    return group.records, group.kept, group.tombstones, removed, group.size_bytes, group.removed_bytes


def _fields(group: KeyGroup) -> dict[str, int]:
    names = ("records", "would_stay", "tombstones", "would_go", "bytes", "bytes_that_would_go")
    return dict(zip(names, _cells(group), strict=True))
