"""Error codes are found wherever an answer has them."""

from __future__ import annotations

import threading

from segmentlog.server.api_table import SERVED
from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.generated import (
    add_partitions_to_txn,
    fetch,
    join_group,
    list_groups,
    produce,
    sasl_handshake,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.response_errors import collect_error_codes
from segmentlog.server.worker_counters import BUCKETS_S, Event, WorkerCounters


def test_codes_of_partitions_and_of_the_whole() -> None:
    """Each error code counts as often as the response contains it."""
    partitions = [produce.PartitionProduceResponse(number, code) for number, code in enumerate((0, 6, 3, 6))]
    answer = produce.ProduceResponse([produce.TopicProduceResponse(partition_responses=partitions)])
    assert collect_error_codes(answer) == [6, 3, 6]
    assert collect_error_codes(fetch.FetchResponse(error_code=70)) == [70]
    assert collect_error_codes(join_group.JoinGroupResponse(error_code=ErrorCode.MEMBER_ID_REQUIRED)) == [79]
    results = [
        add_partitions_to_txn.AddPartitionsToTxnPartitionResult(number, code) for number, code in ((0, 48), (1, 0))
    ]
    added = add_partitions_to_txn.AddPartitionsToTxnTopicResult("t", results)
    assert collect_error_codes(
        add_partitions_to_txn.AddPartitionsToTxnResponse(results_by_topic_v3_and_below=[added])
    ) == [48]
    assert collect_error_codes(list_groups.ListGroupsResponse()) == []
    assert collect_error_codes(sasl_handshake.SaslHandshakeResponse(mechanisms=["PLAIN"])) == []


def test_every_response_can_be_looked_at() -> None:
    """For each supported API an empty response contains no error."""
    for key in SERVED:
        api = APIS[key]
        name = f"{api.name}Response"
        response = getattr(__import__(api.codec.__name__, fromlist=[name]), name)()  # type: ignore[attr-defined]
        assert collect_error_codes(response) == [], name


def test_a_meter_counts_for_all_threads() -> None:
    """No count is missed; a latency is in the first bucket that fits."""
    meter = WorkerCounters()

    def work() -> None:
        for _ in range(1000):
            meter.count_request("Fetch", BUCKETS_S[2])
            meter.count_errors("Fetch", [ErrorCode.OFFSET_OUT_OF_RANGE, 1])
            meter.count_event(Event.CUT)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    meter.count_request("Fetch", 100.0)
    buckets, seconds = meter.apis()["Fetch"]
    assert (buckets[2], buckets[-1], sum(buckets)) == (4000, 1, 4001)
    assert abs(seconds - (4000 * BUCKETS_S[2] + 100)) < 1e-6
    assert meter.error_counts() == {("Fetch", 1): 8000}
    assert meter.count_of(Event.CUT) == 4000
    assert meter.totals()["requests"] == 4001
