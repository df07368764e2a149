"""What Kafka's clients sent, as Spark reads it."""

from __future__ import annotations

from pathlib import Path

from wire import append_sent

import segmentlog
from segmentlog.spark.arrow import ArrowRows
from segmentlog.spark.schema import source_schema


def test_a_clients_batch_has_its_keys_and_values(tmp_path: Path) -> None:
    """Beside batches of the library, with keys and without."""
    with segmentlog.open(tmp_path / "s", background=False) as store:
        log = store.create_topic("t").partition(0)
        log.append([b"1", b"2"], keys=[b"a", None])
        append_sent(log, [b"value", b"keyless", None], [b"key", None, b"null"])
        log.append([b"3"])
        (rows,) = ArrowRows(source_schema(include_headers=True)).of(log.read(0))
    assert rows["key"].to_pylist() == [b"a", None, b"key", None, b"null", None]
    assert rows["value"].to_pylist() == [b"1", b"2", b"value", b"keyless", None, b"3"]
