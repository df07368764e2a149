"""State shared by all connections of one worker: the store, caches, parked fetches, sessions and permissions."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Final

from segmentlog.clock import Clock
from segmentlog.errors import ShippingRefused, UnknownTopic
from segmentlog.format.file_names import GROUPS_FOLDER
from segmentlog.objects.ownership.binding import Binding, new_owner_of, read_binding
from segmentlog.security.acls import Authorizer
from segmentlog.server.ack_waiter import SHIPPED_THREADS, AckWaiter
from segmentlog.server.converted_batch_cache import ConvertedBatchCache, DiskBatchCache
from segmentlog.server.fair_slots import FairSlots
from segmentlog.server.fetch_sessions import FetchSessions
from segmentlog.server.long_poll import FetchPurgatory
from segmentlog.server.request_buffers import BufferPool
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.topic_ids import ForeignTopicId, TopicIds, is_visible
from segmentlog.server.worker_cluster import WorkerCluster
from segmentlog.server.worker_counters import WorkerCounters
from segmentlog.storage.fs import FileSystem

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition
    from segmentlog.server.groups.coordinator import GroupCoordinator
    from segmentlog.store import LogStore

DECOMPRESSED_MAX: Final = 2
"""Client batches decompressed at the same time. One megabyte may decompress to hundreds."""


class Broker:
    """Shared state of one worker, which is a broker to Kafka clients. Thread-safe."""

    def __init__(
        self, store: LogStore, cluster: WorkerCluster, settings: ServerSettings, authorizer: Authorizer,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self.store = store
        self.cluster = cluster
        self.settings = settings
        self.authorizer = authorizer
        self.clock = clock or Clock()
        self.buffers = BufferPool(bound_bytes=settings.limits.buffered_bytes)
        self.fsync_waiter = AckWaiter()
        self.ack_waiter = self.fsync_waiter
        """Waits for what ``acks=all`` requires (setting ``acks_all``)."""
        if settings.acks_all == "shipped":
            self.ack_waiter = AckWaiter(SHIPPED_THREADS, shipped=True)
        self.purgatory = FetchPurgatory()
        limits = settings.limits
        self.fetch_sessions = FetchSessions(
            limits.fetch_sessions, self.clock.monotonic_ms, limits.fetch_session_partitions
        )
        self.topic_ids = TopicIds(store)
        share = settings.limits.rendered_bytes // max(len(cluster.nodes), 1)
        self.converted_batches = ConvertedBatchCache(
            disk=DiskBatchCache(store.path, share), held_max_bytes=limits.rendered_memory_bytes
        )
        self.meter = WorkerCounters()
        self.decompression_slots = FairSlots(DECOMPRESSED_MAX)
        """Slots for handlers that decompress client batches; use them through `RequestContext.decompression_slot`."""
        self._mutex = threading.Lock()
        self._groups: GroupCoordinator | None = None
        self._partitions: weakref.WeakValueDictionary[tuple[str, int], Partition] = weakref.WeakValueDictionary()
        """Open partitions. The store owns them, and drops deleted partitions."""

    @property
    def broker_id(self) -> int:
        """Broker id of this worker."""
        return self.cluster.own_id

    @property
    def new_owner(self) -> str:
        """The machine that has taken over the whole store; "" if there is none. Reads a small file."""
        return new_owner_of(FileSystem(), self.store.path)

    @property
    def is_taken_over(self) -> bool:
        """Whether another machine has taken over the whole store. Reads a small file, once for each client."""
        return bool(self.new_owner)

    @property
    def owner_binding(self) -> Binding | None:
        """The store's identity as an owner in the object store; None if it has none, or was taken over."""
        try:
            binding = read_binding(FileSystem(), self.store.path)
        except (ShippingRefused, OSError):
            return None
        return None if binding is None or binding.fenced else binding

    @property
    def groups(self) -> GroupCoordinator:
        """Group coordinator; created on first use, because a server for producers alone needs none."""
        if self._groups is None:
            from segmentlog.server.groups.coordinator import GroupCoordinator

            with self._mutex:
                self._groups = self._groups or GroupCoordinator(
                    self.store, self.clock, self.settings.groups,
                    worker=self.cluster.own_number, is_coordinator_of=self.cluster.is_coordinator,
                )  # fmt: skip
        return self._groups

    def resume_groups(self) -> None:
        """Load the groups that this worker coordinated before a restart, and start their members' session timeouts."""
        if os.path.exists(f"{self.store.path}/{GROUPS_FOLDER}"):
            self.groups.start_sessions()

    def partition(self, topic: str, number: int, topic_id: str | None = None) -> Partition:
        """Return a partition, and open it first if necessary; cheap if it is open. Raise `UnknownTopic`.

        With ``topic_id``, raise `ForeignTopicId` if the name belongs to another topic.
        """
        partition = self._partitions.get((topic, number))
        if partition is not None and not partition.is_stale and topic_id in (None, partition.topic_id):
            return partition
        if not is_visible(topic):
            raise UnknownTopic(topic, "it is an internal topic of the store")
        try:
            partition = self.store.open_partition(topic, number, topic_id)
        except UnknownTopic:
            if topic_id is not None and not self._has_id(topic, topic_id):
                raise ForeignTopicId(topic, f"its topic id is not {topic_id}") from None
            raise
        self._partitions[topic, number] = partition
        return partition

    def _has_id(self, topic: str, topic_id: str) -> bool:
        try:
            return self.store.topic(topic).id == topic_id
        except UnknownTopic:
            return False

    def opened(self, topic: str, number: int) -> Partition | None:
        """Return the partition if it is open, else None."""
        partition = self._partitions.get((topic, number))
        return None if partition is None or partition.is_stale else partition

    def is_healthy(self, patience_s: float) -> bool:
        """Return whether the locks that delayed responses need are free within ``patience_s`` seconds each."""
        waits = (self.fsync_waiter, self.ack_waiter, self.purgatory)
        return all(part.is_healthy(patience_s) for part in waits)

    def stop_waiting(self) -> None:
        """Answer all parked fetches now, because the server stops."""
        self.purgatory.close()
        if self._groups is not None:
            self._groups.close()

    def close(self) -> None:
        """Stop the background threads after the last request. The store stays open."""
        self.stop_waiting()
        self.fsync_waiter.close()
        self.ack_waiter.close()
        self.converted_batches.close()
