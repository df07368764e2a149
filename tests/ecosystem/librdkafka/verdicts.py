"""The tests of librdkafka's suite that run here, and for each other test the reason why it does not."""

from __future__ import annotations

from typing import Final


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PASS: Final = _words("""
0001_multiobj 0002_unkpart 0003_msgmaxsize 0005_order 0007_autotopic 0008_reqacks 0011_produce_batch
0012_produce_consume 0013_null_msgs 0014_reconsume_191 0015_offsets_seek 0016_client_swname 0017_compression
0018_cgrp_term 0019_list_groups 0020_destroy_hang 0021_rkt_destroy 0022_consume_batch 0026_consume_pause
0029_assign_offset 0030_offset_commit 0031_get_offsets 0033_regex_subscribe 0034_offset_reset 0035_api_version
0036_partial_fetch 0038_performance 0039_event_dr 0040_io_event 0041_fetch_max_bytes 0042_many_topics
0044_partition_cnt 0045_resubscribe_with_regex 0045_subscribe_many_updates 0045_subscribe_update 0048_partitioner
0049_consume_conn_close 0050_subscribe_adds 0051_assign_adds 0052_msg_timestamps 0053_stats 0054_offset_time
0055_producer_latency 0056_balanced_group_mt 0057_invalid_topic 0059_bsearch 0060_op_prio 0061_consumer_lag
0063_clusterid 0064_interceptors 0065_yield 0067_empty_topic 0068_produce_timeout 0069_consumer_add_parts
0070_null_empty 0073_headers 0075_retry 0076_produce_retry 0077_compaction 0083_cb_event 0084_destroy_flags
0085_headers 0086_purge_remote 0088_produce_metadata_timeout 0089_max_poll_interval 0090_idempotence
0091_max_poll_interval_timeout 0093_holb_consumer 0094_idempotence_msg_timeout 0098_consumer_txn 0099_commit_metadata
0102_static_group_rebalance 0103_transactions 0109_auto_create_topics 0110_batch_size 0112_assign_unknown_part
0113_cooperative_rebalance 0114_sticky_partitioning 0115_producer_auth 0118_commit_rebalance 0119_consumer_auth
0122_buffer_cleaning_after_rebalance 0123_connections_max_idle 0125_immediate_flush 0127_fetch_queue_backoff
0129_fetch_aborted_msgs 0130_store_offsets 0132_strategy_ordering 0137_barrier_batch_consume
0139_offset_validation_mock 0140_commit_metadata 0150_telemetry_mock
""")
"""At a server of three workers that makes topics when they are asked for."""

PASS_WITHOUT_AUTO_CREATE: Final = (
    "0045_subscribe_update_topic_remove", "0045_subscribe_update_non_exist_and_partchange", "0107_topic_recreate",
    "0111_delay_create_topics",
)  # fmt: skip
"""Tests of the scenario ``noautocreate``."""

ADMIN: Final = _words("""
do_test_AlterConsumerGroupOffsets do_test_CreateAcls do_test_CreatePartitions do_test_CreateTopics do_test_DeleteAcls
do_test_DeleteConsumerGroupOffsets do_test_DeleteGroups do_test_DeleteRecords do_test_DeleteTopics do_test_DescribeAcls
do_test_DescribeCluster do_test_DescribeConsumerGroups do_test_DescribeTopics do_test_ListConsumerGroupOffsets
do_test_ListConsumerGroups do_test_ListOffsets do_test_unclean_destroy
""")
"""Parts of 0081_admin that pass, at a server of one worker: it asks for as many copies as there are brokers."""

REASONS: Final = {
    "0028_long_topicnames": "librdkafka marks it as a known issue of its own",
    "0047_partial_buf_tmout": "librdkafka marks it as a known issue of its own",
    "0081_admin": "in parts (ADMIN); the others alter a broker's configuration, describe that of a group, or make "
    "users by the protocol: there is none of these",
    "0082_fetch_max_bytes": "left out in quick mode: it writes gigabytes",
    "0092_mixed_msgver": "for formats before version 2, which Kafka 4 does not know either",
    "0097_ssl_verify": "the part with a broker wants TLS with its own certificates; tests/security has TLS",
    "0101_fetch_from_follower": "there are no followers",
    "0126_oauthbearer_oidc": "there is no OAUTHBEARER",
    "0135_sasl_credentials": "runs with SASL alone; tests/security has SCRAM",
    "0142_reauthentication": "runs with SASL alone; tests/security has SCRAM",
    "0190_share_consumer_telemetry": "by hand alone, and there are no share groups",
    "8000_idle": "by hand alone",
    "8001_fetch_from_follower_mock_manual": "by hand alone",
} | dict.fromkeys(
    (
        "0170_share_consumer_subscription", "0171_share_consumer_consume", "0172_share_consumer_acknowledge",
        "0173_share_consumer_commit_async", "0174_share_consumer_concurrency", "0175_share_consumer_groups",
        "0176_share_consumer_commit_sync", "0177_share_consumer_transactions", "0178_share_consumer_close",
        "0179_share_consumer_destroy", "0180_share_consumer_config", "0181_share_consumer_topic_delete",
        "0184_share_consumer_topic_recreate", "0185_share_consumer_max_poll_interval",
    ),
    "there are no share groups (KIP-932)",
)  # fmt: skip

NEW_GROUPS: Final = _words("""
0014_reconsume_191 0018_cgrp_term 0019_list_groups 0022_consume_batch 0026_consume_pause 0029_assign_offset
0030_offset_commit 0033_regex_subscribe 0040_io_event 0044_partition_cnt 0045_subscribe_update 0049_consume_conn_close
0050_subscribe_adds 0051_assign_adds 0056_balanced_group_mt 0059_bsearch 0060_op_prio 0061_consumer_lag
0064_interceptors 0067_empty_topic 0069_consumer_add_parts 0083_cb_event 0089_max_poll_interval
0091_max_poll_interval_timeout 0093_holb_consumer 0099_commit_metadata 0102_static_group_rebalance 0103_transactions
0109_auto_create_topics 0112_assign_unknown_part 0113_cooperative_rebalance 0118_commit_rebalance
0122_buffer_cleaning_after_rebalance 0127_fetch_queue_backoff 0129_fetch_aborted_msgs 0130_store_offsets
0137_barrier_batch_consume 0140_commit_metadata
""")
"""Tests with groups, which run again with the consumer protocol; two others skip themselves then."""
