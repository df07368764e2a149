"""Close stores that the program does not close: dropped stores in a thread, and open stores at exit."""

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
    """The interface of `LogStore` that this module uses."""

    path: str

    @property
    def unsent_count(self) -> int: ...
    def opened_partitions(self) -> Iterable[Partition]: ...
    def close(self) -> None: ...


class _ClosingStores(set[Closable]):
    """Dropped stores that are being closed. A forked child forgets them: its parent closes them."""


open_stores: weakref.WeakSet[Closable] = weakref.WeakSet()
"""Open stores of this process; closing a store removes it."""
closing_stores = _ClosingStores()
fork_safety.on_fork(closing_stores, "clear")


def close_dropped(store: Closable) -> None:
    """Start a thread that closes a dropped store; called by the store's finalizer.

    A finalizer runs in any thread, at any point, and that thread may hold any lock. So the finalizer must not close the
    store itself.
    """
    started: list[int] = []
    try:
        closing_stores.add(store)
        started.extend(starmap(_thread.start_new_thread, ((_start_close_thread, (store,)),)))  # in one step
    except BaseException as error:
        # Interrupted, or no thread can start. Then only the store's descriptors are closed, as if the process had died.
        if not started:
            closing_stores.discard(store)
        if not isinstance(error, RuntimeError):
            raise


def _start_close_thread(store: Closable) -> None:
    """Start the closing thread, in a raw thread: `threading.Thread.start` takes locks, and a finalizer must not."""
    try:
        threading.Thread(target=_close, args=(store,), name="segmentlog-close", daemon=True).start()
    except RuntimeError:
        closing_stores.discard(store)


def _close(store: Closable) -> None:
    """Close a store that was dropped."""
    try:
        for partition in store.opened_partitions():
            partition.handle.resurrect()
        store.close()
    except Exception as error:
        logger.warning("%s was dropped without close(), and could not be closed cleanly: %s", store.path, error)
    finally:
        closing_stores.discard(store)


@atexit.register
def _close_stores() -> None:
    """Close open stores at exit, so that they are closed cleanly."""
    for store in members_of(open_stores):
        if unsent_count := store.unsent_count:
            text = f"{store.path}: {unsent_count} records are appended only at exit: close their producer earlier"
            warnings.warn(text, ResourceWarning, stacklevel=1)
        try:
            store.close()
        except Exception as error:
            logger.warning("%s could not be closed cleanly at exit: %s", store.path, error)
    ends_s = time.monotonic() + _CLOSING_S
    while closing_stores and time.monotonic() < ends_s:
        time.sleep(0.005)
