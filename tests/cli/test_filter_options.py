"""`consume` and `tail`: filters, several topics, JSON values, and the program's own options after the command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.processes import on_terminal

import segmentlog
from segmentlog.cli import cli
from segmentlog.cli.common import run
from segmentlog.schemas.avro_values import AvroSerializer
from segmentlog.speedups import CORE_NAME

Run = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store with `clicks` (two partitions, keys, headers, JSON), `odd` (values not JSON) and `later`."""
    folder = tmp_path / "store"
    with segmentlog.open(folder, background=False) as opened:
        clicks = opened.create_topic("clicks", partitions=2, fsync="never")
        for at in range(40):
            clicks.partition(at % 2).append(
                [b'{"at": %d, "user": {"id": %d}}' % (at, at % 5)], keys=[b"user-%d" % (at % 5)],
                headers=[[("trace", b"%d" % (at % 3))]], timestamps=[1000 + at],
            )  # fmt: skip
        odd = opened.create_topic("odd").partition(0)
        odd.append(
            [b"text", b"\xff", None, b'{"a":\n 1.50}', b"17"], keys=[b"a", b"", None, b"b", b"c"], timestamps=[1005] * 5
        )
        opened.create_topic("later").partition(0).append([b"l0", b"l1"], timestamps=[1010, 1099])
    return folder


@pytest.fixture
def call(store: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Run a command on the store: (exit status, lines of stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, list[str], str]:
        status = run(cli, ["--dir", str(store), *map(str, arguments)])
        sys.stdout.flush()
        done = capfdbinary.readouterr()
        return status, done.out.decode(errors="surrogateescape").splitlines(), done.err.decode()

    return call


FILTERS = [
    (("--key", "user-3"), lambda at: at % 5 == 3),
    (("--key-prefix", "user-"), lambda at: True),
    (("--key-prefix", "user-4"), lambda at: at % 5 == 4),
    (("--contains", '"at": 1'), lambda at: str(at)[0] == "1"),
    (("--where", "user.id == 2"), lambda at: at % 5 == 2),
    (("--where", "$.at >= 30"), lambda at: at >= 30),
    (("--header", "trace=1"), lambda at: at % 3 == 1),
    (("--where", "user.id=0", "--header", "trace==0", "--key-prefix", "u"), lambda at: at % 15 == 0),
    (("--key", ""), lambda at: False),
]


@pytest.mark.parametrize(("options", "fits"), FILTERS)
def test_records_are_chosen(call: Run, options: tuple[str, ...], fits: Callable[[int], bool]) -> None:
    """Records must fit all options; -n counts those that fit, from the front with `consume`, else from the end."""
    wanted = [at for at in range(40) if fits(at)]
    status, lines, _ = call("consume", "clicks", "--values", *options)
    assert status == 0
    assert sorted(json.loads(line)["at"] for line in lines) == wanted
    of_first = [at for at in wanted if at % 2 == 0]
    _, lines, err = call("consume", "clicks/0", "--values", "-n", 2, *options)
    assert [json.loads(line)["at"] for line in lines] == of_first[:2]
    assert f"{len(of_first[:2])} records" in err
    _, lines, _ = call("tail", "clicks/0", "-n", 2, *options)
    assert [json.loads(line)["at"] for line in lines] == of_first[-2:]


def test_a_member_of_a_group_continues_after_what_does_not_fit(call: Run) -> None:
    """With -n the group's position is after the last record that was printed."""
    seen = []
    for _ in range(4):
        _, lines, _ = call("consume", "clicks", "-g", "g", "-q", "--values", "--key", "user-1", "-n", 2)
        seen += [json.loads(line)["at"] for line in lines]
    assert sorted(seen) == [1, 6, 11, 16, 21, 26, 31, 36]
    assert call("consume", "clicks", "-g", "g", "-q", "--values", "--key", "user-1")[1] == []


@pytest.mark.parametrize("command", ["consume", "tail"])
@pytest.mark.parametrize(
    "options", [("--where", "a === 1"), ("--where", ""), ("--header", "=1"), ("--where", "a && b")]
)
def test_a_filter_that_means_nothing_is_wrong_usage(call: Run, command: str, options: tuple[str, str]) -> None:
    """A command that prints nothing would hide the mistake."""
    status, lines, err = call(command, "clicks", *options)
    assert (status, lines) == (2, [])
    assert f"Error: {options[0]}: " in err


def test_a_path_looks_into_avro(call: Run, store: Path) -> None:
    """The schema is the one that the value names, with or without --avro."""
    schema = {"type": "record", "name": "Click", "fields": [{"name": "page", "type": "string"}]}
    with segmentlog.open(store, background=False) as opened:
        opened.create_topic("avro")
        with opened.producer(serializer=AvroSerializer(opened.schemas, schema)) as producer:
            producer.send_many("avro", [{"page": "/home"}, {"page": "/cart"}])
    assert call("consume", "avro", "--avro", "--where", "page == /cart")[1] == ['1 {"page":"/cart"}']
    assert len(call("tail", "avro", "--json", "--where", "page ~ home")[1]) == 1


def test_several_topics_are_told_apart(call: Run, store: Path) -> None:
    """A single topic is printed as "offset value", which scripts rely on. --sources and --no-sources override this."""
    _, lines, _ = call("consume", "later", "odd", "--contains", "t")
    assert lines == ["odd/0 0 text"]
    assert sorted(call("consume", "later", "clicks/1", "--from", "-1")[1]) == [
        'clicks/1 19 {"at": 39, "user": {"id": 4}}', "later/0 1 l1"
    ]  # fmt: skip
    assert call("consume", "later")[1] == ["0 l0", "1 l1"]
    assert call("consume", "later", "--sources")[1] == ["later/0 0 l0", "later/0 1 l1"]
    assert all(line.split()[0].isdecimal() for line in call("consume", "clicks")[1])
    assert all(line.split()[0].isdecimal() for line in call("consume", "clicks", "later", "--no-sources")[1])
    status, _, err = call("consume", "later", "nothing")
    assert (status, "'nothing'" in err) == (1, True)


def test_a_terminal_shows_the_partition_where_there_are_several(store: Path) -> None:
    """A terminal shows it for a single topic, too: scripts do not read it."""
    assert "clicks/1 0 {" in on_terminal(store, "consume", "clicks", "-n", "40", streams="out")[1]
    assert on_terminal(store, "consume", "later", streams="out")[1] == "0 l0\r\n1 l1\r\n"
    assert on_terminal(store, "consume", "clicks/1", "-n", "1", streams="out")[1].startswith("0 {")


def test_a_group_reads_several_topics(call: Run) -> None:
    """A group of several topics reads each record once."""
    lines = call("consume", "later", "odd", "-g", "g", "-q")[1]
    assert lines.count("later/0 1 l1") == 1
    assert call("consume", "later", "odd", "-g", "g", "-q")[1] == []


@pytest.mark.parametrize("command", ["consume", "tail"])
def test_json_values_are_json(call: Run, command: str) -> None:
    """JSON is printed on one line with unchanged numbers; other values are printed as without the option."""
    _, lines, _ = call(command, "odd", "--json-values")
    assert ',"value":{"a":1.50}' in lines[3]
    found = [json.loads(line) for line in lines]
    assert [one.get("value", one.get("value_base64")) for one in found] == ["text", "/w==", None, {"a": 1.5}, 17]
    assert call(command, "odd", "--json", "--json-values")[1] == lines
    assert json.loads(call(command, "odd", "--json")[1][3])["value"] == '{"a":\n 1.50}'


def test_tail_shows_keys(call: Run) -> None:
    """A tab separates key and value, and a null is printed as nothing."""
    assert call("tail", "--keys", "odd")[1] == ["a\ttext", "\t\udcff", "\t", 'b\t{"a":', " 1.50}", "c\t17"]
    assert call("tail", "--keys", "--json", "odd")[0] == 2


def test_tail_of_several_is_in_the_order_of_time(call: Run) -> None:
    """Each partition stays in its own order; a header comes whenever another partition continues."""
    _, lines, _ = call("tail", "-n", 20, "clicks", "later", "-q")
    times = [{"l0": 1010, "l1": 1099}.get(line) or 1000 + json.loads(line)["at"] for line in lines]
    assert times == sorted(times)
    assert len(times) == 42
    _, lines, _ = call("tail", "-n", 2, "later", "clicks")
    assert [line.split(",")[0] for line in lines] == [
        "==> later/0 <==", "l0", "", "==> clicks/0 <==", '{"at": 36', "", "==> clicks/1 <==", '{"at": 37', "",
        "==> clicks/0 <==", '{"at": 38', "", "==> clicks/1 <==", '{"at": 39', "", "==> later/0 <==", "l1",
    ]  # fmt: skip


def test_tail_shows_what_is_committed(call: Run, store: Path) -> None:
    """With --isolation read_committed, records of open or aborted transactions are left out and not counted."""
    with segmentlog.open(store, background=False) as opened, opened.producer(name="p") as producer:
        producer.begin_transaction()
        producer.send("later", b"aborted")
        producer.flush()
        producer.abort_transaction()
    assert call("tail", "later", "-n", 2, "--isolation", "read_committed")[1] == ["l0", "l1"]
    assert call("tail", "later", "-n", 3)[1] == ["l0", "l1", "aborted"]


GLOBAL = [
    ("topics",), ("consume", "later"), ("tail", "later"), ("groups", "list"), ("transactions", "list"),
    ("verify", "later"), ("schemas", "list"), ("describe", "later"),
]  # fmt: skip


@pytest.mark.parametrize("words", GLOBAL)
def test_the_store_is_named_before_or_after_the_command(
    call: Run, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """The option may also come between a command and its subcommand; the last one counts.

    --version and -h work after a command, too.
    """
    monkeypatch.chdir(tmp_path)
    expected = call(*words)[:2]
    assert expected[0] == 0
    monkeypatch.setenv("SEGMENTLOG_DIR", str(tmp_path / "nowhere"))
    for given in ([*words, "--dir", str(store)], [words[0], f"--dir={store}", *words[1:]]):
        assert run(cli, given) == 0
        call("--version")  # takes what `run` printed out of the captured output
    assert call("--dir", tmp_path / "nowhere", *words, "--dir", store)[:2] == expected
    assert call(*words, "--version")[1] == [f"segmentlog, version {segmentlog.__version__} ({CORE_NAME})"]
    assert "Usage:" in call(*words, "-h")[1][0]


def test_every_command_takes_the_store_after_it() -> None:
    """Subcommands take it, too."""
    import click

    def check(group: click.Group, context: click.Context) -> int:
        count = 0
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            assert any("--dir" in param.opts for param in command.params), name
            count += 1
            if isinstance(command, click.Group):
                count += check(command, click.Context(command, parent=context))
        return count

    assert check(cli, click.Context(cli)) > 40
