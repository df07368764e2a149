"""``segmentlog ship --status``: the owner of a shipped store, and what a takeover would lose now."""

from __future__ import annotations

import os
import time
from typing import Any, Final

import click

from segmentlog.cli.table_output import show_json
from segmentlog.errors import SegmentlogError, ShippingRefused
from segmentlog.format.file_names import STORE_FILE
from segmentlog.format.manifest import Manifest
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.ownership.binding import read_binding
from segmentlog.objects.standby.machine_role import FIRST_EPOCH, read_machine_role
from segmentlog.objects.standby.roles import Role
from segmentlog.quantities import format_duration_ms
from segmentlog.storage.fs import FileSystem
from segmentlog.texts import visible

_SHOWN_MAX: Final = 20
"""Gaps that are printed without ``--json``."""


def print_ship_status(bucket: Bucket, path: str, *, as_json: bool) -> None:
    """Print what the manifest and the folder ``path`` show. Raise `ShippingRefused` if nothing is shipped."""
    manifest, _ = require_manifest(bucket)
    now_ms = int(time.time() * 1000)
    document = _describe(bucket, manifest, path, now_ms)
    if as_json:
        show_json(document)
    else:
        _print_text(document, now_ms)


def _describe(bucket: Bucket, manifest: Manifest, path: str, now_ms: int) -> dict[str, Any]:
    owner = manifest.owner
    found: dict[str, Any] = {
        "url": bucket.url,
        "store_id": manifest.store_id,
        "owner": owner.host,
        "owner_epoch": owner.epoch,
        "since_ms": owner.since_ms,
        "nodes": [f"[{node.host}]:{node.port}" if ":" in node.host else f"{node.host}:{node.port}"
                  for node in owner.nodes],
        "shipped_ms": manifest.shipped_ms,
        "is_handed_over": manifest.is_handed_over,
        "has_ended": manifest.ended,
        "last_takeover": None,
        "this_machine": None,
    }  # fmt: skip
    if owner.epoch > FIRST_EPOCH:
        lost = [
            {
                "topic": topic.name,
                "partition": partition.number,
                "offset": one.base_offset,
                "end_offset": one.end_offset,
            }
            for topic in manifest.topics
            for partition in topic.partitions
            for one in partition.lost_ranges
            if one.at_ms >= owner.since_ms
        ]
        found["last_takeover"] = {"at_ms": owner.since_ms, "gaps": lost}
    role = _role_of_folder(bucket, path, now_ms)
    if role is not None:
        found["this_machine"] = role
    return found


def _role_of_folder(bucket: Bucket, path: str, now_ms: int) -> dict[str, Any] | None:
    """Return the role of the store or the replica in the folder; None if it belongs to another store."""
    fs = FileSystem()
    role = read_machine_role(fs, path, now_ms) if os.path.isdir(path) else None
    if role is None or role.url != bucket.url:
        return None
    found: dict[str, Any] = {"folder": path, "role": role.role, "lag_records": role.lag_records}
    if role.role == Role.OWNER.value:
        found["lag_records"] = _count_unshipped(path) if fs.exists(f"{path}/{STORE_FILE}") else None
    else:
        found |= {"lag_s": round(role.lag_s, 3), "reason": role.reason, "problem": role.problem}
    return found


def _count_unshipped(path: str) -> int | None:
    """Return the number of offsets that only the local disk has, or None if reading fails."""
    import segmentlog
    from segmentlog.clock import Clock
    from segmentlog.topics.partition_states import PartitionStates

    try:
        with segmentlog.open(path, create=False, read_only=True, background=False) as store:
            return sum(state.unshipped_count for state in PartitionStates(store, Clock()).states())
    except (SegmentlogError, OSError):
        return None


def _print_text(found: dict[str, Any], now_ms: int) -> None:
    how = "by a takeover" if found["last_takeover"] else "as the first owner"
    _show(f"owner: {found['owner']}, owner's epoch {found['owner_epoch']}, {how}, since {_time(found['since_ms'])}")
    _show(f"server: {', '.join(found['nodes']) or 'none: a standby cannot take over by itself'}")
    _show(
        f"last shipped: {_time(found['shipped_ms'])}, {_ago(found['shipped_ms'], now_ms)}; the owner ships changes only"
    )
    if found["has_ended"]:
        _show("the owner has ended shipping; it may have appended records since")
    if found["last_takeover"] and (gaps := found["last_takeover"]["gaps"]):
        _show(f"last takeover: {len(gaps):,} partitions have a gap in their offsets")
        for gap in gaps[:_SHOWN_MAX]:
            _show(f"  {gap['topic']}/{gap['partition']}: offsets {gap['offset']} to {gap['end_offset'] - 1}")
        if len(gaps) > _SHOWN_MAX:
            _show(f"  and {len(gaps) - _SHOWN_MAX:,} more; --json prints all")
    machine = found["this_machine"]
    if found["is_handed_over"]:
        _show("a takeover now loses nothing: the owner has stopped appends, and has shipped everything")
    elif machine is not None and machine["role"] == Role.OWNER.value and machine["lag_records"] is not None:
        _show(f"a takeover now loses {machine['lag_records']:,} offsets that are only in {machine['folder']}")
    else:
        _show("a takeover now loses what the owner has appended since it shipped last. The object store does not show"
            " how much that is; to see it, run this command on the owner with --dir")  # fmt: skip
    if machine is None:
        return
    _show(f"{machine['folder']}: {machine['role']}")
    if machine["role"] == Role.STANDBY.value:
        _show(f"{machine['lag_records']:,} offsets behind the object store, as of {max(machine['lag_s'], 0):.1f} s ago")
        if machine["problem"]:
            _show(f"error: this standby cannot take over: {machine['problem']}")
        elif machine["reason"]:
            _show(f"it does not take over now: {machine['reason']}")


def _show(text: str) -> None:
    click.echo(visible(text))


def _time(at_ms: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_ms / 1000))


def _ago(at_ms: int, now_ms: int) -> str:
    return f"{format_duration_ms(max(now_ms - at_ms, 0) // 1000 * 1000)} ago"


def url_of_folder(path: str) -> str | None:
    """Return the URL, if any, to which the store in this folder is shipped or which its standby follows."""
    fs = FileSystem()
    try:
        binding = read_binding(fs, path)
    except (ShippingRefused, OSError):
        return None
    if binding is not None:
        return binding.url
    role = read_machine_role(fs, path, 0)
    return None if role is None else role.url
