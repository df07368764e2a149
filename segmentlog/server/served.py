"""What is answered: each API that is served, and the function that does it."""

from __future__ import annotations

from typing import Final

PLACES: Final = {
    0: "produce:produce",
    1: "fetch:fetch",
    2: "list_offsets:list_offsets",
    3: "metadata:metadata",
    8: "group_offsets:offset_commit",
    9: "group_offsets:offset_fetch",
    10: "groups:find_coordinator",
    11: "groups:join_group",
    12: "groups:heartbeat",
    13: "groups:leave_group",
    14: "groups:sync_group",
    15: "group_admin:describe_groups",
    16: "group_admin:list_groups",
    17: "sasl:sasl_handshake",
    18: "versions:api_versions",
    19: "topics:create_topics",
    20: "topics:delete_topics",
    21: "records:delete_records",
    22: "producers:init_producer_id",
    23: "epochs:offset_for_leader_epoch",
    24: "transactions:add_partitions_to_txn",
    25: "transactions:add_offsets_to_txn",
    26: "transactions:end_txn",
    27: "transaction_admin:write_txn_markers",
    28: "txn_offsets:txn_offset_commit",
    29: "acls:describe_acls",
    30: "acls:create_acls",
    31: "acls:delete_acls",
    32: "configs:describe_configs",
    33: "configs:alter_configs",
    35: "records:describe_log_dirs",
    36: "sasl:sasl_authenticate",
    37: "topics:create_partitions",
    42: "group_admin:delete_groups",
    44: "configs:incremental_alter_configs",
    46: "cluster:list_partition_reassignments",
    47: "group_offsets:offset_delete",
    60: "cluster:describe_cluster",
    61: "producers:describe_producers",
    65: "transaction_admin:describe_transactions",
    66: "transaction_admin:list_transactions",
    68: "consumer_groups:consumer_group_heartbeat",
    69: "consumer_groups:consumer_group_describe",
    75: "metadata:describe_topic_partitions",
}
"""What is answered, by API key: file and function below ``handlers``."""

SERVED: Final = tuple(sorted(PLACES))
PRODUCE: Final = 0
API_VERSIONS: Final = 18

QUICK: Final = frozenset((PRODUCE, 1, 3, 8, 10, 12, API_VERSIONS))
"""What waits for nothing but a file's lock: produce, fetch, metadata, commits, heartbeats. What waits in their name,
for the disk or for records, keeps no thread. The others may take long, or are seldom."""
