"""``segmentlog create``, ``topics``, ``describe``, ``alter``, ``rename`` and ``delete``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import click

from segmentlog.cli.common import open_store, say
from segmentlog.cli.option_types import (
    DURATION_MS,
    DURATION_S,
    SIZE,
    complete_topic,
    json_option,
    match_topics,
    require_topic,
)
from segmentlog.cli.table_output import show_json, show_table
from segmentlog.config import TopicConfig
from segmentlog.quantities import format_time

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition
    from segmentlog.store import LogStore, Topic

_DEFAULT: Final = {line.key: line.value for line in TopicConfig().describe()}


def _parse_settings(pairs: tuple[str, ...], named: dict[str, object]) -> dict[str, object]:
    """Return the settings given with -c KEY=VALUE and by options such as --ttl. Raises UsageError."""
    settings: dict[str, object] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise click.UsageError(f"-c {pair}: expected KEY=VALUE, such as -c retention.ms=7d")
        settings[key.strip()] = value.strip()
    settings.update({key: value for key, value in named.items() if value is not None})
    return settings


@click.command()
@click.argument("topic")
@click.option("-p", "--partitions", type=int, help="Number of partitions (1).")
@click.option(
    "--segment-bytes", type=SIZE, metavar="SIZE", help=f"Roll a segment at this size ({_DEFAULT['segment.bytes']})."
)
@click.option("--page-size", type=int, metavar="RECORDS", help="Roll a segment after this many records.")
@click.option("--max", "max_segments", type=int, metavar="N", help="Keep at most N sealed segments.")
@click.option("--ttl", type=DURATION_S, metavar="SECONDS", help="Delete a segment this long after it was sealed.")
@click.option(
    "--retention-ms",
    type=DURATION_MS,
    metavar="TIME",
    help=f"Keep records for this long ({_DEFAULT['retention.ms']}).",
)
@click.option("--retention-bytes", type=SIZE, metavar="SIZE", help="Keep at most SIZE bytes per partition.")
@click.option("--cleanup-policy", metavar="POLICY", help="delete, compact, delete,compact or none.")
@click.option(
    "--fsync", metavar="POLICY", help=f"always, everysec, 250ms, 1000records, 1MiB, never ({_DEFAULT['fsync']})."
)
@click.option("--compression", metavar="CODEC", help="producer, lz4, zstd, gzip, snappy or none.")
@click.option("-c", "--config", "pairs", multiple=True, metavar="KEY=VALUE", help="Any key of the topic config.")
@click.option("--if-not-exists", is_flag=True,
              help="Do not change an existing topic; fail only if its number of partitions is not -p.")  # fmt: skip
@click.pass_context
def create(
    ctx: click.Context,
    topic: str,
    partitions: int | None,
    segment_bytes: int | None,
    page_size: int | None,
    max_segments: int | None,
    ttl: int | None,
    retention_ms: int | None,
    retention_bytes: int | None,
    cleanup_policy: str | None,
    fsync: str | None,
    compression: str | None,
    pairs: tuple[str, ...],
    if_not_exists: bool,
) -> None:
    """Create TOPIC, and the store if it does not exist. Fails if the topic exists, unless --if-not-exists is given."""
    settings = _parse_settings(
        pairs,
        {
            "segment.bytes": segment_bytes,
            "segment.records": page_size,
            "retention.segments": max_segments,
            "retention.closed.ms": ttl,
            "retention.ms": retention_ms,
            "retention.bytes": retention_bytes,
            "cleanup.policy": cleanup_policy,
            "fsync": fsync,
            "compression.type": compression,
        },
    )
    with open_store(ctx, create=True, background=False) as store:
        existed = if_not_exists and topic in store.topics()
        count = store.create_topic(topic, partitions, settings, exist_ok=if_not_exists).partition_count
        what = "exists already:" if existed else "created"
        named = f"{topic} {what}" if existed else f"{what} {topic} with"
        say(f"{named} {count} partition{'s' if count != 1 else ''} in {store.path}")


@click.command()
@click.option("--internal", is_flag=True, help="Include internal topics of the store.")
@json_option
@click.pass_context
def topics(ctx: click.Context, internal: bool, as_json: bool) -> None:
    """List the topics with their partitions and number of offsets from log start to log end.

    Offsets in lost ranges are not counted. Compaction and transactions leave offsets without a record, so a topic may
    have fewer records than offsets.
    """
    rows = []
    with open_store(ctx, read_only=True) as store:
        for name in store.topics(internal=internal):
            partitions = store.topic(name).partitions()
            offsets = sum(one.count_offsets(one.log_start_offset, one.log_end_offset) for one in partitions)
            if as_json:
                show_json({"topic": name, "partitions": len(partitions), "offsets": offsets})
            rows.append((name, len(partitions), offsets))
    if not as_json and rows:
        show_table(("topic", "partitions", "offsets"), rows)
    if not rows:
        say("there are no topics yet; create one with 'segmentlog create TOPIC'")


@click.command()
@click.argument("topic", shell_complete=complete_topic)
@click.option("-n", "--segments", "newest", type=click.IntRange(0), default=10, show_default=True,
              help="Number of newest segments to show for each partition.")  # fmt: skip
@click.option("--all", "everything", is_flag=True, help="Show every key of the configuration, including defaults.")
@click.option("--sizes", is_flag=True, help="Show sizes before compression, too. Reads every batch header.")
@click.option(
    "--producers", is_flag=True, help="Show every producer that the partitions remember (always with --json)."
)
@json_option
@click.pass_context
def describe(
    ctx: click.Context, topic: str, newest: int, everything: bool, sizes: bool, producers: bool, as_json: bool
) -> None:
    """Show TOPIC: configuration, partitions, segments, offsets, epochs, lost ranges, transactions, compaction."""
    with open_store(ctx, read_only=True) as store:
        found = require_topic(store, topic)
        names = _ProducerNames(store)
        partitions = [_describe(partition, newest, sizes, names) for partition in found.partitions()]
        if as_json:
            config = _config_document(found, everything)
            show_json({"topic": topic, "id": found.id, "config": config, "partitions": partitions})
            return
        _show_config(found, everything)
        _show_partitions(partitions, sizes)
        _show_transactions(partitions)
        if producers:
            _show_producers(partitions)


def _config_document(topic: Topic, everything: bool) -> dict[str, str]:
    return {line.key: line.value for line in topic.config.describe() if everything or not line.is_default}


class _ProducerNames:
    """Names of producers by producer id, read from the store at the first call of `name_of`."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._names: dict[int, str] | None = None

    def name_of(self, producer_id: int) -> str | None:
        """Return the name; None for an unnamed producer, or one whose name has expired."""
        if self._names is None:
            from segmentlog.transactions.transaction_coordinator import ANONYMOUS

            self._names = {}
            for name, state in self._store.transactions.states().items():
                if not name.startswith(ANONYMOUS):
                    self._names[state.producer_id] = name
                    self._names.setdefault(state.previous_id, name)
        return self._names.get(producer_id)


def _describe(partition: Partition, newest: int, sizes: bool, names: _ProducerNames) -> dict[str, Any]:
    segments = partition.segments()
    report: dict[str, Any] = {
        "partition": partition.number,
        "log_start_offset": partition.log_start_offset,
        "log_end_offset": partition.log_end_offset,
        "durable_offset": partition.durable_offset,
        "last_stable_offset": partition.last_stable_offset,
        "epoch": partition.epoch,
        "stored_bytes": sum(segment.size_bytes for segment in segments),
        "remote_bytes": sum(segment.size_bytes for segment in segments if segment.remote),
        "local_log_start_offset": partition.local_log_start_offset,
        "raw_bytes": None,
        "segment_count": len(segments),
        "segments": segments[len(segments) - newest :] if newest else [],
        "epochs": partition.epochs(),
        "lost_ranges": partition.lost_ranges(),
        **_describe_producers(partition, names),
    }
    if sizes:
        report["raw_bytes"] = sum(batch.header.raw_size for batch in partition.read(partition.log_start_offset))
    if partition.config.compacts:
        report.update(_describe_compaction(partition))
    return report


def _describe_producers(partition: Partition, names: _ProducerNames) -> dict[str, Any]:
    from segmentlog.storage.state_page import PRODUCERS_WORD

    # Read only a log that has had a producer.
    known = partition.producers() if partition.handle.page.words[PRODUCERS_WORD] else []
    producers = [
        {
            "producer_id": producer.producer_id,
            "name": names.name_of(producer.producer_id),
            "epoch": producer.epoch,
            "last_sequence": producer.last_sequence,
            "last_offset": producer.next_offset - 1,
            "appended_ms": producer.appended_ms,
            "transaction_offset": producer.transaction_offset if producer.transaction_offset >= 0 else None,
        }
        for producer in known
    ]
    opened = [
        {
            "producer_id": producer["producer_id"],
            "name": producer["name"],
            "epoch": producer["epoch"],
            "first_offset": producer["transaction_offset"],
        }
        for producer in producers
        if producer["transaction_offset"] is not None
    ]
    return {"producer_count": len(producers), "open_transactions": opened, "producers": producers}


def _describe_compaction(partition: Partition) -> dict[str, Any]:
    import msgspec

    note = msgspec.structs.asdict(partition.cleaner_note())
    why = note.pop("uncleanable")
    return {
        "cleaned_offset": partition.cleaned_offset,
        "dirty_ratio": partition.dirty_ratio(),
        "last_compaction": note if note["at_ms"] else None,
        "uncleanable": why or None,
    }


def _show_config(topic: Topic, everything: bool) -> None:
    lines = [line for line in topic.config.describe() if everything or not line.is_default]
    click.echo(f"{topic.name}: {topic.partition_count} partitions in {topic.folder}")
    click.echo(f"id: {topic.id}")
    if lines:
        show_table(("key", "value", "meaning"), [(line.key, line.value, line.meaning) for line in lines])
    else:
        click.echo("configuration: all defaults (--all shows them)")


def _show_partitions(partitions: list[dict[str, Any]], sizes: bool) -> None:
    columns = ["partition", "start", "end", "durable", "epoch", "segments", "stored bytes"]
    fields = ["partition", "log_start_offset", "log_end_offset", "durable_offset", "epoch", "segment_count",
              "stored_bytes"]  # fmt: skip
    if any(partition["last_stable_offset"] != partition["log_end_offset"] for partition in partitions):
        columns.insert(3, "stable")
        fields.insert(3, "last_stable_offset")
    if any(partition["producer_count"] for partition in partitions):
        columns.append("producers")
        fields.append("producer_count")
    if any(partition["remote_bytes"] for partition in partitions):  # stored bytes that are only in the object store
        columns.append("of these remote")
        fields.append("remote_bytes")
    if sizes:
        columns.append("raw bytes")
        fields.append("raw_bytes")
    click.echo("")
    show_table(columns, [[partition[field] for field in fields] for partition in partitions])
    segments = [(partition["partition"], segment) for partition in partitions for segment in partition["segments"]]
    if segments:
        click.echo("")
        show_table(
            ("partition", "segment", "end", "bytes", "newest record", ""),
            [
                (
                    number,
                    segment.base_offset,
                    segment.end_offset,
                    segment.size_bytes,
                    format_time(segment.max_timestamp),
                    "active" if segment.active else "remote" if segment.remote else "sealed",
                )
                for number, segment in segments
            ],
        )
    _show_compaction([partition for partition in partitions if "cleaned_offset" in partition])
    for partition in partitions:
        for lost in partition["lost_ranges"]:
            click.echo(
                f"partition {partition['partition']}: offsets {lost.base_offset} to {lost.end_offset - 1} are lost"
                f" ({lost.reason}); epoch {lost.epoch} continues at {lost.end_offset}"
            )


def _show_transactions(partitions: list[dict[str, Any]]) -> None:
    """Print undecided transactions, which withhold records from readers with isolation read_committed."""
    rows = [
        (partition["partition"], opened["producer_id"], opened["name"], opened["epoch"], opened["first_offset"])
        for partition in partitions
        for opened in partition["open_transactions"]
    ]
    if rows:
        click.echo("")
        show_table(("partition", "open transaction of", "name", "epoch", "first offset"), rows)


def _show_producers(partitions: list[dict[str, Any]]) -> None:
    rows = [
        (partition["partition"], known["producer_id"], known["name"], known["epoch"], known["last_sequence"],
         known["last_offset"], format_time(known["appended_ms"]))
        for partition in partitions
        for known in partition["producers"]
    ]  # fmt: skip
    click.echo("")
    if rows:
        columns = ("partition", "producer", "name", "epoch", "last sequence", "last offset", "last append")
        show_table(columns, rows)
    else:
        click.echo("no producers")


def _show_compaction(partitions: list[dict[str, Any]]) -> None:
    """Print the cleaned offset of each partition, and the result of the last pass."""
    if not partitions:
        return
    rows = []
    for partition in partitions:
        last = partition["last_compaction"]
        saved: list[object] = [None, None, None]
        if last is not None:
            saved = [
                format_time(last["at_ms"]),
                last["records_before"] - last["records_after"],
                last["bytes_before"] - last["bytes_after"],
            ]
        rows.append([partition["partition"], partition["cleaned_offset"], f"{partition['dirty_ratio']:.0%}", *saved])
    click.echo("")
    show_table(("partition", "cleaned up to", "dirty", "last pass", "records saved", "bytes saved"), rows)
    for partition in partitions:
        if partition["uncleanable"]:
            click.echo(f"partition {partition['partition']} uncleanable: {partition['uncleanable']}")
        if (last := partition["last_compaction"]) and last["unreadable"]:
            click.echo(f"partition {partition['partition']} has records that cannot be read: {last['unreadable']}")


@click.command()
@click.argument("topic", shell_complete=complete_topic)
@click.option("-p", "--partitions", type=int, help="New number of partitions; it can only grow.")
@click.option("-c", "--config", "pairs", multiple=True, metavar="KEY=VALUE", help="A key of the topic config.")
@click.pass_context
def alter(ctx: click.Context, topic: str, partitions: int | None, pairs: tuple[str, ...]) -> None:
    """Change the configuration of TOPIC, or add partitions, while other processes use it."""
    settings = _parse_settings(pairs, {})
    if not settings and partitions is None:
        raise click.UsageError("nothing to change: give -c KEY=VALUE or --partitions N")
    with open_store(ctx, background=False) as store:
        require_topic(store, topic)
        altered = store.alter_topic(topic, settings, partitions=partitions)
        for key, value in _config_document(altered, False).items():
            say(f"{key} = {value}")
        say(f"altered {topic}; it has {altered.partition_count} partitions")


@click.command()
@click.argument("topic", shell_complete=complete_topic)
@click.argument("new_name")
@click.pass_context
def rename(ctx: click.Context, topic: str, new_name: str) -> None:
    """Rename TOPIC. Processes that use the old name get an error."""
    with open_store(ctx, background=False) as store:
        require_topic(store, topic)
        store.rename_topic(topic, new_name)
        say(f"renamed {topic} to {new_name}")


@click.command()
@click.argument("topics", nargs=-1, required=True, shell_complete=complete_topic)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.pass_context
def delete(ctx: click.Context, topics: tuple[str, ...], yes: bool) -> None:
    """Delete TOPICS (names, or patterns in quotes) with all their records."""
    with open_store(ctx, background=False) as store:
        names = match_topics(store, topics)
        if not yes:
            if not sys.stdin.isatty():
                raise click.UsageError("this deletes topics; without a terminal, add --yes")
            click.confirm(f"Delete {', '.join(names)} and all records?", abort=True, err=True)
        for name in names:
            store.delete_topic(name)
            say(f"deleted {name}")
