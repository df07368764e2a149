"""Assign partitions and groups to workers. Each worker is a broker to Kafka clients.

The assignment spreads the load. It is not needed for correctness, because any process may append to any partition. A
worker answers a request for another worker's partition with an error that names that worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import xxhash

STANDBY_ID: Final = 0
"""Node id of the workers of a standby; no node has it."""


class WorkerNode(NamedTuple):
    """Address of one worker as clients see it."""

    node_id: int
    host: str
    port: int


_NO_NODE: Final = WorkerNode(-1, "", -1)
"""Node in answers about an unknown leader or coordinator, as in Kafka."""


class WorkerCluster:
    """All workers of a server. Immutable.

    In a worker of a standby, ``nodes`` are the workers of the owner's server, and ``own_id`` is `STANDBY_ID`.

    idle_nodes  workers that lead nothing, and that clients get as brokers, too: at the owner those of another machine,
                at a standby its own
    """

    def __init__(
        self, cluster_id: str, nodes: Sequence[WorkerNode], own_id: int, idle_nodes: Sequence[WorkerNode] = ()
    ) -> None:
        self.cluster_id = cluster_id
        self.nodes = tuple(nodes)
        self.own_id = own_id
        known = {node.node_id for node in nodes}
        self.brokers = (*self.nodes, *(node for node in idle_nodes if node.node_id not in known))
        """All nodes that clients get."""
        self._is_single = len(nodes) == 1 and own_id != STANDBY_ID

    @property
    def is_standby(self) -> bool:
        """Whether this worker leads nothing, and sends clients to the owner of the store."""
        return self.own_id == STANDBY_ID

    def is_own(self, node_id: int) -> bool:
        """Return whether a client that expects this node has connected to the right process."""
        own_ids = (
            [node.node_id for node in self.brokers if node not in self.nodes] if self.is_standby else [self.own_id]
        )
        return node_id in own_ids

    @property
    def controller_id(self) -> int:
        """The node for administrative requests; -1 if no node is known."""
        return self.nodes[0].node_id if self.nodes else -1

    @property
    def own(self) -> WorkerNode:
        """The worker of this process."""
        return next(node for node in self.nodes if node.node_id == self.own_id)

    @property
    def own_number(self) -> int:
        """Number of the worker of this process, from 1 on; 0 in a worker of a standby."""
        return 0 if self.is_standby else 1 + self.nodes.index(self.own)

    def leader_of(self, topic_id: str, partition: int) -> WorkerNode:
        """Return the worker that serves a partition; the partitions of a topic are spread evenly."""
        if self._is_single:
            return self.nodes[0]
        if not self.nodes:
            return _NO_NODE
        return self.nodes[(xxhash.xxh3_64_intdigest(topic_id.encode()) + partition) % len(self.nodes)]

    def leads(self, topic_id: str, partition: int) -> bool:
        """Return whether this worker leads the partition."""
        return self._is_single or self.leader_of(topic_id, partition).node_id == self.own_id

    def coordinator_of(self, key: str) -> WorkerNode:
        """Return the worker that coordinates a group or a transactional id."""
        if self._is_single:
            return self.nodes[0]
        if not self.nodes:
            return _NO_NODE
        return self.nodes[xxhash.xxh3_64_intdigest(key.encode()) % len(self.nodes)]

    def is_coordinator(self, key: str) -> bool:
        """Return whether this worker coordinates the group or the transactional id."""
        return self._is_single or self.coordinator_of(key).node_id == self.own_id
