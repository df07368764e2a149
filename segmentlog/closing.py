"""Stores that nobody closes: a thread closes those that were dropped, and those still open are as the program ends."""

from __future__ import annotations

import _thread
import atexit
import logging
import threading
import time
import warnings
import weakref
from collections.abc import Iterable
from itertools import starmap
from typing import Final, Protocol

from segmentlog.log.partition import Partition
from segmentlog.storage import fork_safety
from segmentlog.weak_sets import members_of

logger = logging.getLogger("segmentlog")

_CLOSING_S: Final = 10.0


class Closable(Protocol):
    """What is needed of a `LogStore`."""

    path: str

    @property
    def unsent_count(self) -> int: ...
    def opened_partitions(self) -> Iterable[Partition]: ...
    def close(self) -> None: ...


class _BeingClosed(set[Closable]):
    """Dropped ones; a forked child leaves them to its parent."""


open_stores: weakref.WeakSet[Closable] = weakref.WeakSet()
"""Those of this process; who closes one takes it out."""
being_closed = _BeingClosed()
fork_safety.on_fork(being_closed, "clear")


def close_dropped(store: Closable) -> None:
    """Have a thread close a store that the collector has found to be dropped; for its finalizer.

    Whatever thread comes by runs that, at any point and with any lock held, so another one closes the store, and
    brings it back for that.
    """
    started: list[int] = []
    try:
        being_closed.add(store)
        started.extend(starmap(_thread.start_new_thread, ((_begin_to_close, (store,)),)))  # in one step
    except BaseException as error:
        # Interrupted, or no thread to spare: its descriptors go by themselves, as if its process had died.
        if not started:
            being_closed.discard(store)
        if not isinstance(error, RuntimeError):
            raise


def _begin_to_close(store: Closable) -> None:
    """In a thread that `threading` does not know: starting one that it knows takes locks, as no finalizer may."""
    try:
        threading.Thread(target=_close, args=(store,), name="segmentlog-close", daemon=True).start()
    except RuntimeError:
        being_closed.discard(store)


def _close(store: Closable) -> None:
    """Close a store that nobody can reach any more."""
    try:
        for partition in store.opened_partitions():
            partition.handle.resurrect()
        store.close()
    except Exception as error:
        logger.warning("%s was dropped without being closed, and cannot be closed cleanly: %s", store.path, error)
    finally:
        being_closed.discard(store)


@atexit.register
def _close_stores() -> None:
    """A program that ends without closing its store still leaves it clean."""
    for store in members_of(open_stores):
        if unsent_count := store.unsent_count:
            text = f"{store.path}: {unsent_count} records are appended only as the program ends: close their producer"
            warnings.warn(text, ResourceWarning, stacklevel=1)
        try:
            store.close()
        except Exception as error:
            logger.warning("%s: not closed cleanly as the program ends: %s", store.path, error)
    ends_s = time.monotonic() + _CLOSING_S
    while being_closed and time.monotonic() < ends_s:
        time.sleep(0.005)
