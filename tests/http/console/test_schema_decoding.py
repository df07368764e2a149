"""Values that name a schema of the store's registry, as the console shows them."""

import json
from pathlib import Path

from doors import Client

from segmentlog.http.context import HttpContext
from segmentlog.schemas.avro_values import AvroSerializer
from segmentlog.schemas.parsed_schemas import Draft
from segmentlog.schemas.schema_id_framing import encode_head
from segmentlog.store import LogStore

_CLICK = {"type": "record", "name": "Click", "fields": [{"name": "page", "type": "string"}]}


def test_a_value_is_shown_by_its_schema(tmp_path: Path) -> None:
    """Decoded values are JSON text; a value with an unknown schema is shown undecoded."""
    with LogStore(tmp_path / "store", background=False) as store:
        log = store.create_topic("clicks").partition(0)
        with store.producer(serializer=AvroSerializer(store.schemas, _CLICK)) as producer:
            producer.send("clicks", {"page": "<script>alert(1)</script>"})
        log.append([b"\0\0\0\1\0nobody knows 256", b"\0\0\0\0\1not a click"])
        with Client(HttpContext(store)) as client:
            first = client.get("/ui/topics/clicks/records/0/0").text
            assert "&#34;page&#34;: &#34;&lt;script&gt;" in first
            assert "<script>alert" not in first
            assert client.get("/ui/topics/clicks/records/0/0?as=hex").status_code == 200
            for offset in (1, 2):
                other = client.get(f"/ui/topics/clicks/records/0/{offset}")
                assert other.status_code == 200
                assert "&#34;page&#34;" not in other.text


_LIST = {"type": "record", "name": "L", "fields": [{"name": "next", "type": ["null", "L"]}]}
_TREE = {
    "type": "record",
    "name": "T",
    "fields": [
        {"name": "of", "type": {"type": "array", "items": "T"}},
        {"name": "more", "type": {"type": "array", "items": "int"}},
    ],
}


def test_values_that_are_deep_are_shown_as_any_other(tmp_path: Path) -> None:
    """Deeply nested values cause neither an error nor a huge page."""
    with LogStore(tmp_path / "store", background=False) as store:
        log = store.create_topic("deep").partition(0)
        ids = [store.schemas.register(f"{one['name']}-value", Draft(json.dumps(one))).id for one in (_LIST, _TREE)]
        ints = b"\x80\xb5\x18" + b"\2" * 200_000 + b"\0"  # a list of two hundred thousand
        log.append(
            [
                encode_head(ids[0]) + b"\2" * 20_000 + b"\0",
                encode_head(ids[0]) + b"\2" * 20 + b"\0",
                encode_head(ids[1]) + b"\2" * 50 + b"\0" + ints + b"\0\0" * 50,
            ]
        )
        with Client(HttpContext(store)) as client:
            for offset, is_shown in ((0, False), (1, True), (2, False)):
                page = client.get(f"/ui/topics/deep/records/0/{offset}")
                assert page.status_code == 200
                assert ("as=schema" in page.text or "&#34;next&#34;" in page.text) == is_shown
