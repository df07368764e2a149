"""Table of the supported Kafka APIs and their handlers."""

from __future__ import annotations

from typing import Final

HANDLERS: Final = {
    0: "produce:produce",
    1: "fetch:fetch",
    2: "list_offsets:list_offsets",
    3: "metadata_handlers:metadata",
    8: "group_offsets:offset_commit",
    9: "group_offsets:offset_fetch",
    10: "classic_group_handlers:find_coordinator",
    11: "classic_group_handlers:join_group",
    12: "classic_group_handlers:heartbeat",
    13: "classic_group_handlers:leave_group",
    14: "classic_group_handlers:sync_group",
    15: "group_admin_handlers:describe_groups",
    16: "group_admin_handlers:list_groups",
    17: "sasl_handlers:sasl_handshake",
    18: "api_versions:api_versions",
    19: "topic_handlers:create_topics",
    20: "topic_handlers:delete_topics",
    21: "delete_records:delete_records",
    22: "init_producer_id:init_producer_id",
    23: "offset_for_leader_epoch:offset_for_leader_epoch",
    24: "transaction_handlers:add_partitions_to_txn",
    25: "transaction_handlers:add_offsets_to_txn",
    26: "transaction_handlers:end_txn",
    27: "transaction_admin_handlers:write_txn_markers",
    28: "txn_offset_commit:txn_offset_commit",
    29: "acl_handlers:describe_acls",
    30: "acl_handlers:create_acls",
    31: "acl_handlers:delete_acls",
    32: "config_handlers:describe_configs",
    33: "config_handlers:alter_configs",
    35: "delete_records:describe_log_dirs",
    36: "sasl_handlers:sasl_authenticate",
    37: "topic_handlers:create_partitions",
    42: "group_admin_handlers:delete_groups",
    44: "config_handlers:incremental_alter_configs",
    46: "describe_cluster:list_partition_reassignments",
    47: "group_offsets:offset_delete",
    60: "describe_cluster:describe_cluster",
    61: "init_producer_id:describe_producers",
    65: "transaction_admin_handlers:describe_transactions",
    66: "transaction_admin_handlers:list_transactions",
    68: "consumer_group_heartbeat:consumer_group_heartbeat",
    69: "consumer_group_heartbeat:consumer_group_describe",
    75: "metadata_handlers:describe_topic_partitions",
}
"""Handler of each API key: module in ``handlers``, and function."""

SERVED: Final = tuple(sorted(HANDLERS))
PRODUCE: Final = 0
API_VERSIONS: Final = 18

NON_BLOCKING: Final = frozenset((PRODUCE, 1, 3, 8, 10, 12, API_VERSIONS))
"""APIs whose handlers block at most for a file lock: produce, fetch, metadata, commits, heartbeats. Their requests
use no thread while they wait for the disk or for records. All other APIs may take long, or are rare."""
