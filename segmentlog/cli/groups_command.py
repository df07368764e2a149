"""``segmentlog groups``: show the lag of consumer groups, reset and delete their committed offsets."""

from __future__ import annotations

import difflib
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from segmentlog.cli.common import open_store, say
from segmentlog.cli.option_types import (
    DURATION_MS,
    POSITION,
    SELECTOR,
    Selector,
    StartPosition,
    json_option,
    match_partitions,
    resolve_position,
)
from segmentlog.cli.table_output import show_json, show_table
from segmentlog.errors import GroupNotEmpty
from segmentlog.quantities import format_time
from segmentlog.records import TopicPartition
from segmentlog.texts import in_line

if TYPE_CHECKING:
    from segmentlog.groups.group_admin import GroupDescription, MemberDescription, PartitionDescription
    from segmentlog.log.partition import Partition
    from segmentlog.store import LogStore


@click.group()
def groups() -> None:
    """List, describe, reset and delete consumer groups."""


@groups.command("list")
@json_option
@click.pass_context
def list_groups(ctx: click.Context, as_json: bool) -> None:
    """List the groups that have members or committed offsets."""
    rows: list[tuple[object, ...]] = []
    with open_store(ctx, read_only=True) as store:
        for name in store.groups.names():
            group = store.groups.describe(name)
            topics = sorted({partition.topic for partition in group.partitions})
            lags = [partition.lag for partition in group.partitions if partition.lag is not None]
            lag = sum(lags) if lags else None
            if as_json:
                show_json(
                    {"group": name, "state": group.state, "members": len(group.members), "topics": topics, "lag": lag}
                )
            rows.append((name, group.state, len(group.members), ", ".join(topics), lag))
    if rows and not as_json:
        show_table(("group", "state", "members", "topics", "lag"), rows)
    if not rows:
        say("there are no groups yet; 'segmentlog consume TOPIC --group NAME' creates one")


@groups.command()
@click.argument("group")
@json_option
@click.pass_context
def describe(ctx: click.Context, group: str, as_json: bool) -> None:
    """Show the members of GROUP, their partitions, committed offsets and lag."""
    with open_store(ctx, read_only=True) as store:
        found = _existing_group(store, group)
    if as_json:
        show_json(_document(found))
        return
    generation = f", generation {found.generation}, {found.strategy}" if found.generation else ""
    held = f", held by {found.holder}" if found.holder else ""
    click.echo(f"{in_line(found.group)}: {found.state}{generation}, {len(found.members)} members{held}")
    if found.members:
        click.echo("")
        show_table(
            ("member", "client", "pid", "host", "last poll", "partitions"),
            [_member_row(member) for member in found.members],
        )
    if found.partitions:
        click.echo("")
        show_table(
            ("topic", "partition", "committed offset", "end", "lag", "member", "committed at", "metadata"),
            [_partition_row(partition) for partition in found.partitions],
        )


def _member_row(member: MemberDescription) -> tuple[object, ...]:
    partitions = ", ".join(map(str, member.partitions))
    polled = None if member.idle_s is None else f"{member.idle_s:.1f} s ago"
    return member.id, member.client_id, member.pid, member.host, polled, partitions


def _partition_row(partition: PartitionDescription) -> tuple[object, ...]:
    committed = partition.committed
    at, metadata = (format_time(committed.committed_ms), committed.metadata) if committed is not None else (None, "")
    pending = "in an open transaction" if partition.pending else at
    end = "gone" if partition.log_end_offset is None else partition.log_end_offset
    position = None if committed is None else committed.offset
    return (
        partition.topic, partition.partition, position, end, partition.lag, partition.member or None, pending, metadata
    )  # fmt: skip


def _document(group: GroupDescription) -> dict[str, Any]:
    return {
        "group": group.group,
        "state": group.state,
        "generation": group.generation,
        "strategy": group.strategy,
        "holder": group.holder or None,
        "members": [
            {
                "member": member.id,
                "client_id": member.client_id,
                "instance_id": member.instance_id,
                "pid": member.pid,
                "host": member.host,
                "subscription": member.topics,
                "joined_ms": member.joined_ms,
                "last_poll_s": None if member.idle_s is None else round(member.idle_s, 3),
                "partitions": [str(tp) for tp in member.partitions],
            }
            for member in group.members
        ],
        "partitions": [
            {
                "topic": partition.topic,
                "partition": partition.partition,
                "committed_offset": partition.committed.offset if partition.committed else None,
                "log_end_offset": partition.log_end_offset,
                "lag": partition.lag,
                "member": partition.member or None,
                "committed_ms": partition.committed.committed_ms if partition.committed else None,
                "metadata": partition.committed.metadata if partition.committed else None,
                "pending": partition.pending,
            }
            for partition in group.partitions
        ],
    }


def _existing_group(store: LogStore, name: str, more: str = "") -> GroupDescription:
    """Return a group. If it does not exist, raise ClickException with the closest name and the advice ``more``."""
    names = store.groups.names()
    if name in names:
        return store.groups.describe(name)
    close = difflib.get_close_matches(name, names, n=1)
    advice = f"did you mean {close[0]!r}?" if close else "'segmentlog groups list' lists the groups"
    raise click.ClickException(f"group {name!r}: it has neither members nor committed offsets; {advice}{more}")


# ---------------------------------------------------------------- reset


class _ResetTarget(NamedTuple):
    """Target of a reset: a position in each partition, or a number of offsets to shift each committed offset by."""

    place: StartPosition | None
    shift: int = 0

    def offset_in(self, log: Partition, old: int | None) -> int:
        """Return the offset to commit for a partition whose committed offset is ``old``; it may be outside the log.

        Raises ClickException for a shift if ``old`` is None.
        """
        if self.place is not None:
            return resolve_position(self.place, log)
        if old is None:
            raise click.ClickException(f"--shift-by: the group has no committed offset in {log.topic}/{log.number}")
        return old + self.shift


def _selectors(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[Selector, ...]:
    """Parse ``TOPIC``, ``TOPIC:PARTITION`` as in Kafka's tools, or ``TOPIC/PARTITION``; each may be a pattern."""
    selectors = []
    for value in values:
        try:
            selectors.append(SELECTOR.convert(value.replace(":", "/", 1), param, ctx))
        except click.BadParameter:
            raise click.BadParameter(
                f"{value!r} is not TOPIC or TOPIC:PARTITION, such as clicks or clicks:0", ctx, param
            ) from None
    return tuple(selectors)


@groups.command()
@click.argument("group")
@click.option("--topic", "topics", multiple=True, callback=_selectors, metavar="TOPIC[:PARTITION]",
              help="Reset only these, even if nothing is committed for them; default: all with a committed"
                   " offset.")  # fmt: skip
@click.option("--to-earliest", is_flag=True, help="To the first record.")
@click.option("--to-latest", is_flag=True, help="To the end: existing records are not read.")
@click.option("--to-offset", type=click.IntRange(0), metavar="OFFSET", help="To this offset.")
@click.option(
    "--to-datetime", type=POSITION, metavar="TIME", help="To the first record at or after 2026-07-31T12:00, -1h, @MS."
)
@click.option("--by-duration", type=DURATION_MS, metavar="TIME", help="To the first record of the last 1h, 7d.")
@click.option("--shift-by", type=int, metavar="N", help="By N offsets; back if negative.")
@click.option("--dry-run", is_flag=True, help="Print the changes, but do not make them.")
@json_option
@click.pass_context
def reset(
    ctx: click.Context, /, group: str, topics: tuple[Selector, ...], dry_run: bool, as_json: bool, **given: Any
) -> None:
    """Move the committed offsets of GROUP, which must have no live members.

    Give exactly one of --to-earliest, --to-latest, --to-offset, --to-datetime, --by-duration and --shift-by. A target
    outside a log is moved to the nearest end of the log. For a new GROUP, --topic names the partitions in which to
    commit offsets.
    """
    target = _target(**given)
    with open_store(ctx, read_only=dry_run, background=False) as store:
        is_new = bool(topics) and group not in store.groups.names()
        found = (
            store.groups.describe(group)
            if is_new
            else _existing_group(store, group, ", or create its offsets with --topic")
        )
        if found.members or found.holder:
            raise GroupNotEmpty(group, len(found.members), found.holder)
        old = {TopicPartition(entry.topic, entry.partition): entry.committed for entry in found.partitions}
        moves: dict[TopicPartition, int] = {}
        clamped: list[str] = []
        for tp in _find_partitions(store, found, topics):
            log = store.topic(tp.topic).partition(tp.partition)
            known = old.get(tp)
            target_offset = target.offset_in(log, known.offset if known is not None else None)
            moves[tp] = min(max(target_offset, log.log_start_offset), log.log_end_offset)
            if moves[tp] != target_offset:
                extent = f"[{log.log_start_offset}, {log.log_end_offset}]"
                clamped.append(f"{tp}: offset {target_offset} is outside {extent}; using {moves[tp]}")
        if not dry_run:
            store.groups.reset(group, moves)
    for line in clamped:
        say(line)
    rows = [(*tp, known.offset if (known := old.get(tp)) is not None else None, offset) for tp, offset in moves.items()]
    if as_json:
        for topic, partition, before, after in rows:
            show_json({"group": group, "topic": topic, "partition": partition, "old": before, "new": after,
                       "dry_run": dry_run})  # fmt: skip
    elif rows:
        show_table(("topic", "partition", "old", "new"), rows)
    done = "created" if is_new else "moved"
    say(f"{len(rows):,} committed offsets of {group} {'would be ' if dry_run else ''}{done}")


def _target(
    *,
    to_earliest: bool,
    to_latest: bool,
    to_offset: int | None,
    to_datetime: StartPosition | None,
    by_duration: int | None,
    shift_by: int | None,
) -> _ResetTarget:
    """Return the target. Raises UsageError unless exactly one option is given."""
    targets = []
    if to_earliest:
        targets.append(_ResetTarget(StartPosition("earliest")))
    if to_latest:
        targets.append(_ResetTarget(StartPosition("latest")))
    if to_offset is not None:
        targets.append(_ResetTarget(StartPosition("offset", to_offset)))
    if to_datetime is not None:
        if to_datetime.kind != "time":
            raise click.UsageError("--to-datetime: give a time, as in 2026-07-31T12:00, -1h or @1785456000000")
        targets.append(_ResetTarget(to_datetime))
    if by_duration is not None:
        targets.append(_ResetTarget(StartPosition("time", time.time_ns() // 1_000_000 - by_duration)))
    if shift_by is not None:
        targets.append(_ResetTarget(None, shift_by))
    if len(targets) != 1:
        raise click.UsageError(
            "give exactly one of --to-earliest, --to-latest, --to-offset, --to-datetime, --by-duration or --shift-by"
        )
    return targets[0]


def _find_partitions(store: LogStore, group: GroupDescription, topics: tuple[Selector, ...]) -> list[TopicPartition]:
    """Return the partitions to reset, each once: the partitions of ``topics``, or all with a committed offset."""
    if topics:
        found = {
            TopicPartition(owner.name, number): None
            for selector in topics
            for owner, number in match_partitions(store, selector)
        }
        return sorted(found)
    for partition in group.partitions:
        if partition.log_end_offset is None:
            say(f"{partition.topic}/{partition.partition} does not exist any more; its committed offset is unchanged")
    return [
        TopicPartition(partition.topic, partition.partition)
        for partition in group.partitions
        if partition.committed is not None and partition.log_end_offset is not None
    ]


# ---------------------------------------------------------------- delete


@groups.command()
@click.argument("names", nargs=-1, required=True, metavar="GROUP...")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.pass_context
def delete(ctx: click.Context, names: tuple[str, ...], yes: bool) -> None:
    """Delete GROUPs, which must have no live members, with their committed offsets."""
    names = tuple(dict.fromkeys(names))
    with open_store(ctx, background=False) as store:
        for name in names:
            found = _existing_group(store, name)
            if found.members or found.holder:
                raise GroupNotEmpty(name, len(found.members), found.holder)
        if not yes:
            if not sys.stdin.isatty():
                raise click.UsageError("this deletes committed offsets; without a terminal, add --yes")
            click.confirm(f"Delete {', '.join(names)} and all committed offsets?", abort=True, err=True)
        for name in names:
            store.groups.delete(name)
            say(f"deleted {name}")
