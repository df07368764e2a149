"""The check of `test_trial` detects each of these ways to break a standby."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace
from objects.shipping_trial import Broken
from objects.standby_trial import StandbyTrial

from segmentlog.errors import SegmentlogError
from segmentlog.format.grant import OffsetGrant
from segmentlog.format.manifest import MANIFEST_KEY, Manifest, encode_manifest
from segmentlog.objects.bucket.upload_pool import new_nonce
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.ownership.binding import Binding, read_binding
from segmentlog.objects.ownership.claim import new_owner
from segmentlog.policy.takeover_decision import OwnerWatch, TakeoverDecision
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.grant_file import read_grant, write_grant
from segmentlog.topics.topic_admin import TopicAdmin

_ROUNDS = 60
_STEPS = 80
_TAKEOVER = "segmentlog.objects.takeover"
_STANDBY = "segmentlog.objects.standby"


def patched(**values: object) -> Callable[[], AbstractContextManager[Any]]:
    """Return a patch of several attributes."""

    def patch() -> ExitStack:
        stack = ExitStack()
        for what, value in values.items():
            stack.enter_context(mock.patch(what, value))
        return stack

    return patch


def _put_anyway(
    bucket: Any, path: str, fs: FileSystem, binding: Binding, manifest: Manifest, tag: str, now_ms: int, nodes: Any,
    *, force: bool, decided_on: str,
) -> Binding:  # fmt: skip
    """Put the manifest that was read when the takeover began, whatever the object store has by now."""
    if manifest.owner.id == binding.owner_id:
        return binding
    for _ in range(5):  # another machine may ship meanwhile
        bucket.get(MANIFEST_KEY)
    taken = replace(new_owner(binding.owner_epoch, now_ms), id=binding.owner_id, nodes=nodes)
    changed = replace(manifest, owner=taken, sequence=manifest.sequence + 1, nonce=new_nonce(), shipped_ms=now_ms)
    bucket.shelf.compare_and_swap("standby", MANIFEST_KEY, encode_manifest(changed), require_manifest(bucket)[1])
    return binding


def _write_grants(fs: FileSystem, path: str, binding: Binding, manifest: Manifest, parallel: int) -> None:
    """Write the grants without checking the owner."""
    for topic in manifest.topics:
        for partition in topic.partitions:
            write_grant(fs, f"{path}/{topic.name}/{partition.number}", OffsetGrant(partition.offset_grant))


def _decide(watch: OwnerWatch, *, is_complete: bool) -> TakeoverDecision:
    """Take over as soon as one probe has failed."""
    return TakeoverDecision(is_complete and watch._silent_since_s is not None, "at once")


def _throw_away(admin: TopicAdmin, name: str, folder: str) -> None:
    """Delete the former store."""
    admin._fs.remove_tree(f"{admin._path}/{name}")


def _fenced(fs: FileSystem, path: str) -> Binding | None:
    """Return the binding of a former owner as if it were fenced."""
    found = read_binding(fs, path)
    return None if found is None else replace(found, fenced=found.fenced or "somebody")


SABOTAGES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a takeover without the conditional put": patched(**{f"{_TAKEOVER}._become_owner": _put_anyway}),
    "a takeover without the silence": patched(**{f"{_STANDBY}.standby.OwnerWatch.decide": _decide}),
    "a store that serves before it is owned": patched(
        **{f"{_TAKEOVER}._become_owner": lambda *args, **_: args[3], f"{_TAKEOVER}._write_grants": _write_grants}
    ),
    "a former store thrown away": patched(**{f"{_STANDBY}.former_owner.TopicAdmin.set_aside": _throw_away}),
    "a former owner that is not fenced": patched(
        **{f"{_STANDBY}.standby.read_binding": _fenced, f"{_STANDBY}.former_owner.read_binding": _fenced}
    ),
    "programs that do not notice the move": patched(
        **{
            f"{_STANDBY}.former_owner.TopicAdmin.notify_moved": lambda *_: None,
            "segmentlog.log.handle.Handle.read_grant": lambda handle: read_grant(handle.fs, handle.folder),
            "segmentlog.log.handle.Handle._check_not_set_aside": lambda *_: None,
        }
    ),
    "programs that may change a replica": patched(
        **{
            f"segmentlog.topics.{name}.check_not_set_aside": lambda *_: None
            for name in ("topic_registry", "topic_admin")
        }
    ),
}
_LED_THERE: dict[str, dict[str, int]] = {
    "a takeover without the conditional put": {"tick": 60, "append": 60},
    "a former owner that is not fenced": {"former returns": 40},
    "programs that do not notice the move": {"former returns": 40, "use former store": 40},
    "programs that may change a replica": {"former returns": 40, "use former store": 40},
}
"""Steps that are made more frequent where the fault is rare."""


@pytest.mark.long
@pytest.mark.parametrize("name", SABOTAGES)
def test_it_is_caught(memory_path: Path, name: str) -> None:
    """Within these rounds, a guarantee is broken, or a standby does not continue."""
    seen: Counter[str] = Counter()
    for number in range(_ROUNDS):
        folder = memory_path / str(number)
        folder.mkdir()
        try:
            with SABOTAGES[name]():
                StandbyTrial(folder, f"standby sabotage/{number}", seen, often=_LED_THERE.get(name, {})).run(_STEPS)
        except (Broken, SegmentlogError, AssertionError) as error:
            print(f"round {number}: {error}")
            return
    pytest.fail(f"nobody noticed in {_ROUNDS} rounds")
