"""Values that name a schema of the store's registry, as the console shows them."""

from pathlib import Path

from doors import Client

from segmentlog.http.site import Site
from segmentlog.schemas.avro_values import AvroSerializer
from segmentlog.store import LogStore

_CLICK = {"type": "record", "name": "Click", "fields": [{"name": "page", "type": "string"}]}


def test_a_value_is_shown_by_its_schema(tmp_path: Path) -> None:
    """As JSON, never as HTML; its bytes are there as well, and what names no schema here is shown as what it is."""
    with LogStore(tmp_path / "store", background=False) as store:
        log = store.create_topic("clicks").partition(0)
        with store.producer(serializer=AvroSerializer(store.schemas, _CLICK)) as producer:
            producer.send("clicks", {"page": "<script>alert(1)</script>"})
        log.append([b"\0\0\0\1\0nobody knows 256", b"\0\0\0\0\1not a click"])
        with Client(Site(store)) as client:
            first = client.get("/ui/topics/clicks/records/0/0").text
            assert "&#34;page&#34;: &#34;&lt;script&gt;" in first
            assert "<script>alert" not in first
            assert client.get("/ui/topics/clicks/records/0/0?as=hex").status_code == 200
            for offset in (1, 2):
                other = client.get(f"/ui/topics/clicks/records/0/{offset}")
                assert other.status_code == 200
                assert "&#34;page&#34;" not in other.text
