"""A member of a consumer group in its own process, until it is stopped or killed.

    group_member.py STORE GROUP LOG OPTIONS     OPTIONS: JSON with options of `store.consumer` and the keys below

It appends each action to the file LOG at once, one line each: monotonic ns, pid, member id, action, details.

    commit_every   commit after this many records (0: never)
    sync           whether a commit waits for the disk
    pause_s        duration of the work on a record
    stop_at        send SIGSTOP to itself while it works on this record; then commit
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import segmentlog
from segmentlog.records import TopicPartition


def main() -> None:
    """Work until killed or stopped."""
    path, group, log, text = sys.argv[1:5]
    options: dict[str, Any] = json.loads(text)
    commit_every = options.pop("commit_every", 1)
    sync = options.pop("sync", False)
    pause_s = options.pop("pause_s", 0)
    stop_at = options.pop("stop_at", 0)
    topics = options.pop("topics", ["t"])
    log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(what: str, *details: object) -> None:
        words = (time.monotonic_ns(), os.getpid(), consumer.member_id, what, *details)
        os.write(log_fd, (" ".join(map(str, words)) + "\n").encode())

    def listener(what: str) -> Any:
        def listen(partitions: list[TopicPartition]) -> None:
            for tp in partitions:
                tell(what, tp, consumer.generation)
            if what == "revoked" and commit_every:
                consumer.commit({tp: consumer.position(*tp) for tp in partitions}, sync=False)

        return listen

    store = segmentlog.open(path, background=False)
    consumer = store.consumer(
        *topics, group=group, follow=True, max_poll_records=options.pop("max_poll_records", 5),
        on_assigned=listener("assigned"), on_revoked=listener("revoked"), on_lost=listener("lost"), **options,
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: consumer.wakeup())
    tell("joined")
    for count, record in enumerate(consumer, 1):
        tell("record", f"{record.topic}/{record.partition}", record.offset)
        if pause_s:
            time.sleep(pause_s)
        if count == stop_at:
            tell("stopping")
            os.kill(os.getpid(), signal.SIGSTOP)
            tell("continued")
            try:
                consumer.commit()
                tell("committed")
            except segmentlog.ConsumerFenced:
                tell("fenced")
        elif commit_every and count % commit_every == 0:
            try:
                consumer.commit(sync=sync)
            except segmentlog.ConsumerFenced:
                tell("fenced")
    consumer.close()
    store.close()


main()
