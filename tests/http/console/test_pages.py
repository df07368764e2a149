"""The console's pages: their content, and that data from a log never become part of the markup."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from console_shop import HOSTILE, Page
from doors import Client

from segmentlog.cli import cli
from segmentlog.cli.common import run
from segmentlog.http.context import HttpContext
from segmentlog.records import TopicPartition
from segmentlog.store import LogStore

ALL_PAGES = [
    "/", "/?q=ord&sort=size&dir=desc&internal=1", "/?sort=rate", "/?sort=risk", "/?sort=damage", "/topics/orders",
    "/topics/orders/partitions/0", "/topics/customers", "/topics/customers/partitions/0", "/topics/empty",
    "/topics/empty/partitions/0", "/topics/hostile", "/topics/orders/records", "/topics/hostile/records?n=200",
    "/topics/orders/records?at=start&path=user.id+%3D+3", "/topics/orders/records?at=key&where=user-3",
    "/topics/orders/records?partition=1&at=offset&where=20&committed=1", "/topics/orders/records?at=time&where=-1h",
    "/topics/empty/records", "/topics/orders/records/0/5", "/topics/orders/records/0/5?as=hex",
    *(f"/topics/hostile/records/0/{at}" for at in range(20)), "/topics/orders/tail",
    "/topics/orders/tail?partition=1&key=x",
    "/groups", "/groups?q=bil", "/groups/group?group=billing", "/transactions", "/transactions?open=1", "/damage",
    "/topics/__consumer_offsets", "/topics/__transaction_state/records",
]  # fmt: skip
WRITING_PAGES = [
    "/topics/orders/config", "/topics/orders/delete", "/groups/reset?group=billing",
    "/groups/reset?group=billing&to=earliest",
    "/transactions/abort?name=etl-1",
]  # fmt: skip


def test_a_browser_is_sent_to_the_topics(read_only_client: Client) -> None:
    """The root of the server and the console's path without its slash redirect to the list of topics."""
    for path in ("/", "/ui"):
        answer = read_only_client.get(path, headers={"accept": "text/html"})
        assert answer.headers["location"] == "/ui/"


def test_pages_keep_to_the_policy_and_can_be_read_aloud(ui: Callable[[str], Page]) -> None:
    """No inline script or style, local addresses only, one heading, labels for all fields, unique ids."""
    for path in ALL_PAGES + WRITING_PAGES:
        page = ui(path)
        labels = {attributes.get("for") for tag, attributes in page.elements if tag == "label"}
        for tag, attributes in page.elements:
            assert "style" not in attributes, (path, tag)
            assert not [name for name in attributes if name.startswith("on")], (path, tag)
            assert tag not in ("style", "iframe", "object", "embed", "base", "img"), path
            if tag == "script":
                assert (attributes["src"] or "").startswith("/ui/static/"), path
            for name in ("href", "src", "action"):
                value = attributes.get(name)
                assert value is None or value.startswith("/ui/") or value == "#main", (path, tag, value)
            if tag in ("input", "select") and attributes.get("type") not in ("hidden", "checkbox"):
                assert attributes["id"] in labels, (path, attributes)
        tags = [tag for tag, _ in page.elements]
        assert tags.count("h1") == 1, path
        assert tags.count("main") == 1, path
        ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
        assert len(ids) == len(set(ids)), path


def test_nothing_in_a_log_becomes_part_of_a_page(ui: Callable[[str], Page]) -> None:
    """Keys, values, headers, group names and client names are text on every page."""
    pages = [*ALL_PAGES, *(f"/groups/group?group={quote(name)}" for name in HOSTILE)]
    pages += [f"/groups/reset?to=latest&group={quote(name)}" for name in HOSTILE]
    pages += [
        f"/topics/hostile/records?{name}={quote(text)}" for text in HOSTILE for name in ("key", "value", "header")
    ]
    for path in pages:
        page = ui(path)
        scripts = [attributes for tag, attributes in page.elements if tag == "script"]
        assert len(scripts) == 1, path
        assert {tag for tag, _ in page.elements}.isdisjoint({"b", "i", "textarea", "img"}), path
        shown = page.text.replace("\n", "").replace("\t", "")
        assert not re.search("[\0-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", shown), path
    shown = ui("/topics/hostile/records?n=200").text
    assert "<script>document.title='pwned'</script>" in shown
    assert "{{ 7 * 7 }}" in shown
    assert "\\u202eevil" in shown


def test_topics_are_listed_sorted_filtered_and_paged(store: LogStore, client: Client) -> None:
    """The list sorts by any column, and shows internal topics on request."""
    for at in range(230):
        store.create_topic(f"topic-{at:03}")
    store.topic("topic-007").partition(0).append([b"x" * 100] * 50)
    store.groups.reset("g", {TopicPartition("topic-000", 0): 0})

    def names(path: str) -> list[str]:
        return re.findall(r'<th scope="row"><a href="/ui/topics/([^"]+)"', client.get(f"/ui/{path}").text)

    assert names("") == [f"topic-{at:03}" for at in range(100)]
    assert names("?page=3") == [f"topic-{at:03}" for at in range(200, 230)]
    assert names("?page=99999") == names("?page=3")
    assert names("?page=x") == names("")
    assert names("?dir=desc")[0] == "topic-229"
    assert names("?q=22") == ["topic-022", "topic-122", *(f"topic-{at}" for at in range(220, 230))]
    for sort in ("records", "size"):
        assert names(f"?sort={sort}")[0] == "topic-007"
    assert "__consumer_offsets" in names("?internal=1")
    assert names("?q=nothing") == []


def test_a_topic_says_what_is_at_risk_and_who_set_what(store: LogStore, client: Client) -> None:
    """The page shows unsynced records, keys that the topic sets, and defaults."""
    store.create_topic("t", config={"fsync": "never", "retention.ms": "3d"}).partition(0).append([b"x"] * 1234)
    page = Page(client.get("/ui/topics/t").text)
    text = " ".join(page.text.split())
    assert re.search(r"At risk now 1,234 for [0-9.]+ s", text)
    assert "retention.ms 3d this topic" in text
    assert "cleanup.policy delete default" in text
    labels = [attributes["aria-label"] or "" for tag, attributes in page.elements if tag == "svg"]
    assert any("1 active segments" in label for label in labels)


def test_segments_are_shown_by_their_state(ui: Callable[[str], Page]) -> None:
    """The strip and the table distinguish compacted, sealed and active segments."""
    text = " ".join(ui("/topics/customers/partitions/0").text.split())
    assert "compacted: offsets 0 to 500" in text
    assert "active: offsets 500 to 600" in text
    assert "Clean up to 500" in text
    assert "Records, before and after 500 → 100" in text
    assert "sealed: offsets" in " ".join(ui("/topics/orders/partitions/1").text.split())


def test_records_are_found_from_any_place(ui: Callable[[str], Page]) -> None:
    """A search starts at the end, the beginning, an offset, a time or a key, filters, and can be continued."""

    def offsets(path: str) -> list[tuple[int, int]]:
        found = [attributes["href"] or "" for tag, attributes in ui(f"/topics/{path}").elements if tag == "a"]
        rows = [re.search(r"/records/(\d+)/(\d+)$", href) for href in found]
        return [(int(row[1]), int(row[2])) for row in rows if row]

    assert offsets("customers/records?partition=0&n=3") == [(0, 599), (0, 598), (0, 597)]
    assert offsets("customers/records?partition=0&at=offset&where=550&n=2") == [(0, 550), (0, 551)]
    assert offsets("customers/records?partition=0&at=key&where=c42&n=2") == [(0, 542), (0, 543)]
    assert offsets("customers/records?partition=0&key=c42&at=start") == [(0, 442), (0, 542)]
    assert offsets("orders/records?partition=1&at=start&path=order+>+100&n=1") == [(1, 34)]
    assert len(offsets("orders/records?at=time&where=-1h&n=200")) == 200
    seen: list[tuple[int, int]] = []
    path = "/topics/orders/records?at=start&header=trace%3D7&n=20"
    for _ in range(3):
        page = ui(path)
        rows = [re.search(r"/records/(\d+)/(\d+)$", a["href"] or "") for tag, a in page.elements if tag == "a"]
        seen += [(int(row[1]), int(row[2])) for row in rows if row]
        further = [a["href"] or "" for tag, a in page.elements if tag == "a" and "go=" in (a["href"] or "")]
        if not further:
            break
        path = further[0].removeprefix("/ui")
    assert sorted(seen) == [(0, 7), (1, 7), (2, 7)]


@pytest.mark.parametrize(
    ("query", "where"),
    [("path=%5B", "path"), ("at=time&where=x", "where"), ("at=offset&where=-1h", "where"), ("at=offset", "where"),
     ("at=key&where=nobody", "where")],
)  # fmt: skip
def test_what_cannot_be_looked_for_is_told_beside_its_field(opened: LogStore, query: str, where: str) -> None:
    """An invalid field keeps its text and shows an error next to it."""
    with Client(HttpContext(opened)) as client:
        answer = client.get(f"/ui/topics/orders/records?{query}")
    assert answer.status_code == 422
    assert f'id="{where}-error"' in answer.text


def test_a_record_is_shown_in_full_or_its_front(opened: LogStore, ui: Callable[[str], Page]) -> None:
    """A value is shown as JSON, text and hexadecimal, and downloaded as bytes."""
    page = ui("/topics/orders/records/0/5")
    assert '"name": "User 1"' in page.text
    assert "segmentlog consume orders/0 --from 5 -n 1 --json" in page.text
    assert "7b 22 6f 72" in ui("/topics/orders/records/0/5?as=hex").text
    assert "Truncated: the value has 1,044,000 bytes" in ui("/topics/hostile/records/0/17").text
    with Client(HttpContext(opened)) as client:
        answer = client.get("/ui/topics/hostile/records/0/0/value")
        assert answer.content == HOSTILE[0].encode()
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"].startswith("attachment")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert client.get("/ui/topics/hostile/records/0/18/value").status_code == 404  # a tombstone
        missing = client.get("/ui/topics/customers/records/0/17")  # compacted away
        assert missing.status_code == 404
        assert "There is no record at this offset" in missing.text


def test_a_schema_is_used_where_there_is_somebody_who_knows_it(store: LogStore) -> None:
    """Decoded values are shown as text, never as markup."""
    from starlette.applications import Starlette
    from starlette.routing import Mount
    from starlette.testclient import TestClient

    from segmentlog.http import console

    store.create_topic("t").partition(0).append([b"\0\0\0\0\1abc", b"plain"])
    routes = console.routes(console.Console(HttpContext(store)), lambda topic, value: f'{{"<i>{topic}": {len(value)}}}')
    client = TestClient(Starlette(routes=[Mount("/ui", routes=routes)]))
    page = Page(client.get("/ui/topics/t/records/0/0").text)
    assert "By schema" in page.text
    assert '{"<i>t": 8}' in page.text
    assert "By schema" not in client.get("/ui/topics/t/records/0/1").text


def test_damage_lost_ranges_and_recoveries_are_on_one_page(tmp_path: Path) -> None:
    """The page lists findings of the scrubber, and lost ranges with their reasons."""
    with LogStore(tmp_path / "store", background=False) as store:
        log = store.create_topic("t", config={"segment.records": 10, "compression.type": "none"}).partition(0)
        for _ in range(3):
            log.append([b"some value"] * 10)
        log.truncate(25)
        path = Path(log.segments()[0].path)
    data = bytearray(path.read_bytes())
    data[data.index(b"some")] ^= 1
    path.write_bytes(data)
    with (
        LogStore(tmp_path / "store", background=False, scrub_bytes_per_s=1 << 30) as store,
        Client(HttpContext(store)) as client,
    ):
        store.scrub_tick(0)
        store.scrub_tick(10_000)
        text = " ".join(Page(client.get("/ui/damage").text).text.split())
        assert "t/0 0 10" in text
        assert "checksum" in text
        assert re.search(r"t/0 25 [0-9,]+", text)
        assert "truncated" in text
        topics = Page(client.get("/ui/").text).text
        assert "1 damaged" in topics
        assert "lost" in topics


def test_static_files_are_kept_by_browsers_and_change_with_their_content(
    ui: Callable[[str], Page], opened: LogStore
) -> None:
    """Static files are cached, their addresses change with their content, and other files are not served."""
    with Client(HttpContext(opened)) as client:
        for tag, attributes in ui("/").elements:
            address = attributes.get("src") if tag == "script" else attributes.get("href") if tag == "link" else None
            if address:
                answer = client.get(address)
                assert answer.status_code == 200
                assert "immutable" in answer.headers["cache-control"]
                assert re.search(r"\?[0-9a-f]{12}$", address)
        for name in ("nothing.css", "..%2Fpages.py", "../pages.py"):
            assert client.get(f"/ui/static/{name}").status_code == 404


def test_what_is_not_there_is_a_page_that_says_so(client: Client) -> None:
    """Unknown topics, partitions, groups and paths get an error page with status 404 or 422."""
    for path in ("/nowhere", "/topics/none", "/topics/none/records", "/groups/group?group=none", "/groups/group",
                 "/topics/__consumer_offsets", "/topics/a%00b", "/topics/..%2f..", "/topics/%3Cscript%3E"):  # fmt: skip
        answer = client.get(f"/ui{path}")
        assert answer.status_code in (404, 422), path
        assert "<h1>" in answer.text
        assert "<script>" not in answer.text
    client.context.store.create_topic("t")
    for path in (
        "partitions/9",
        "partitions/x",
        "records/9/0",
        "records/0/x",
        "records?partition=9",
        "tail?partition=9",
    ):
        assert client.get(f"/ui/topics/t/{path}").status_code == 404, path


def test_rates_are_there_at_the_second_look(store: LogStore, client: Client) -> None:
    """The first page asks its script to refresh until rates are available."""
    log = store.create_topic("t").partition(0)
    assert "data-soon" in client.get("/ui/").text
    log.append([b"x"] * 100_000)
    until_s = time.monotonic() + 30
    while "data-soon" in (text := client.get("/ui/").text):
        assert time.monotonic() < until_s
        time.sleep(0.2)
    rate = re.search(r'<td class="n">([0-9,.]+)</td>\s*<td>.*</td>\s*<td>1000ms</td>', text)
    assert rate
    assert float(rate[1].replace(",", "")) > 1000


def test_the_navigation_counts_what_the_store_has(store: LogStore, client: Client) -> None:
    """Topics, groups, open transactions and topics with damage; the counts follow a refresh of the overview."""
    store.create_topic("t").partition(0).append([b"x"] * 10)
    store.create_topic("damaged").partition(0).append([b"x"] * 10)
    store.topic("damaged").partition(0).truncate(5)
    store.groups.reset("g", {TopicPartition("t", 0): 0})
    with store.producer(name="etl") as producer, producer.transaction():
        producer.send("t", b"x")
        producer.flush()
        text = client.get("/ui/").text
    titles = re.findall(r'<span class="count[^"]*" title="([^"]+)"', text)
    assert titles == ["2 topics", "1 group", "1 open transaction", "1 topic with damage"]


def test_a_topic_has_a_sparkline_once_there_are_two_samples(store: LogStore, client: Client) -> None:
    """The list of topics and the topic's page draw records/s over the last minutes."""
    log = store.create_topic("t").partition(0)
    until_s = time.monotonic() + 30
    while '<svg class="spark"' not in (text := client.get("/ui/").text):
        assert time.monotonic() < until_s
        log.append([b"x"] * 1000)
        time.sleep(0.2)
    assert re.search(r'aria-label="Records/s over [0-9.]+ s: at most [0-9,.]+, now [0-9,.]+"', text)
    assert '<svg class="spark"' in client.get("/ui/topics/t").text


def test_a_group_has_a_plot_of_its_lag_after_two_looks(
    store: LogStore, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group's page draws its lag after two samples, and has the samples as a table."""
    monkeypatch.setattr("segmentlog.http.console.charts._INTERVAL_S", 0.0)
    log = store.create_topic("t").partition(0)
    store.groups.reset("g", {TopicPartition("t", 0): 0})
    assert "<polyline" not in client.get("/ui/groups/group?group=g").text
    log.append([b"x"] * 1500)
    text = client.get("/ui/groups/group?group=g").text
    assert "<polyline" in text
    assert "at most 1,500, now 1,500" in text
    assert json.loads("1500") == store.groups.describe("g").partitions[0].lag


@pytest.mark.parametrize(
    "query",
    [
        "", "?n=20", "?at=start", "?at=start&key=user-3", "?at=end&n=20&key=user-3", "?at=end&header=trace%3D7",
        "?at=start&path=user.id+%3D%3D+3&n=20", "?at=start&value=User+5", "?at=key&where=user-3&n=20",
        "?at=offset&where=17&partition=1",
        "?at=offset&where=-3", "?at=start&committed=1&path=order+%3D%3D+-1",
        "?at=end&committed=1&path=order+%3D%3D+-1", "?at=start&path=user.name+~+'user+2'&key=user-2&partition=2",
    ],
)  # fmt: skip
def test_the_same_on_the_command_line_is_the_same(
    ui: Callable[[str], Page], query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:  # fmt: skip
    """The command on a page prints the records of the page, in any working directory, filters included."""
    page = ui(f"/topics/orders/records{query}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SEGMENTLOG_DIR", raising=False)
    found = _run_shown(page, "--json", capfdbinary)
    links = [attributes.get("href") or "" for _, attributes in page.elements]
    shown = {
        (one[1], one[2]) for link in links if (one := re.fullmatch(r"/ui/topics/orders/records/(\d+)/(\d+)", link))
    }
    printed = {(str(one["partition"]), str(one["offset"])) for one in found}
    assert shown <= printed
    per_partition = Counter(partition for partition, _ in printed)
    # A page limits the records of all partitions together; `tail -n` and `--from -N` limit those of each partition.
    assert printed == shown or (("at=end" in query or "at=" not in query) and len(per_partition) > 1)


def test_the_command_lines_of_other_pages_run(
    ui: Callable[[str], Page],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    """The commands on the pages of a record and of a group run."""
    monkeypatch.chdir(tmp_path)
    (record,) = _run_shown(ui("/topics/orders/records/0/5"), "", capfdbinary)
    assert (record["partition"], record["offset"]) == (0, 5)
    assert _run_shown(ui("/groups/group?group=billing"), "--json", capfdbinary)
    assert (
        "tail -f orders --key user-1 --where 'user.id == 1' --dir"
        in ui("/topics/orders/tail?key=user-1&path=user.id+%3D%3D+1").text
    )


def _run_shown(page: Page, more: str, capfdbinary: pytest.CaptureFixture[bytes]) -> list[dict[str, Any]]:
    """Run the command that a page shows, and return its output as JSON."""
    (shown,) = [attributes["data-copy"] or "" for _, attributes in page.elements if "data-copy" in attributes]
    name, *words = shlex.split(shown)
    assert name == "segmentlog"
    capfdbinary.readouterr()
    assert run(cli, [*words, *more.split()]) == 0
    sys.stdout.flush()
    return [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("query", "field"), [("path=a+%3D%3D%3D+1", "path"), ("path=a+%26%26+b", "path"), ("header=%3D1", "header")]
)
def test_a_filter_that_means_nothing_is_told_beside_its_field(opened: LogStore, query: str, field: str) -> None:
    """An invalid filter is an error on the pages of records and of the live tail, never an empty result."""
    with Client(HttpContext(opened)) as client:
        for page in ("records", "tail"):
            answer = client.get(f"/ui/topics/orders/{page}?{query}")
            assert answer.status_code == 422
            assert f'id="{field}-error"' in answer.text
