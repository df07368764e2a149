"""The content of a store as JSON: everything that a reader may ask for.

Tests compare a store with its description by the release that created it. Byte strings are Latin-1. Clocks and values
that depend on them are left out.
"""

from __future__ import annotations

from typing import Any

from segmentlog.store import LogStore


def describe(store: LogStore) -> dict[str, Any]:
    """Return the content of a store."""
    return {
        "topics": {name: _topic(store, name) for name in store.topics()},
        "positions": {
            group: {
                str(tp): [one.offset, one.epoch, one.metadata, one.generation, one.member]
                for tp, one in sorted(store.group_offsets.committed(group).items())
            }
            for group in store.group_offsets.groups()
        },
        "pending": {
            group: sorted(map(str, store.group_offsets.pending(group))) for group in store.group_offsets.groups()
        },
        "producers": {
            name: [state.producer_id, state.epoch, state.status, state.previous_id, state.note, list(state.ends)]
            for name, state in sorted(store.transactions.states().items())
            if not name.startswith("~")
        },
    }


def _topic(store: LogStore, name: str) -> dict[str, Any]:
    topic = store.topic(name)
    partitions = []
    for number in range(topic.partition_count):
        log = topic.partition(number)
        start = log.log_start_offset
        committed = log.read(start, isolation="read_committed")
        partitions.append(
            {
                "log_start_offset": start,
                "epochs": [[one.epoch, one.start_offset] for one in log.epochs()],
                "lost_ranges": [[one.base_offset, one.end_offset, one.epoch] for one in log.lost_ranges()],
                "segments": [one.base_offset for one in log.segments()],
                "cleaned_offset": log.cleaned_offset,
                "open_transactions": sorted(one.producer_id for one in log.open_transactions()),
                "last_numbers": sorted([one.producer_id, one.epoch, one.last_number] for one in log.producers()),
                "records": [_record(record) for batch in log.read(start) for record in batch.records()],
                "committed": [record.offset for batch in committed for record in batch.records()],
            }
        )
    return {
        "config": topic.config.to_mapping(),
        "partitions": partitions,
    }


def _record(record: Any) -> list[Any]:
    headers = [[name, _text(value)] for name, value in record.headers]
    return [record.offset, record.timestamp, _text(record.key), _text(record.value), headers]


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode("latin-1")
