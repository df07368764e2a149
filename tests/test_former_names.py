"""Names of earlier versions still work: exceptions, arguments, methods and commands that were renamed."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import segmentlog
from segmentlog import errors
from segmentlog.cli import cli
from segmentlog.errors import InvalidConfig
from segmentlog.store import LogStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Yield an empty store."""
    with segmentlog.open(tmp_path / "store", background=False) as opened:
        yield opened


FORMER = {
    "GrantExhausted": errors.OffsetGrantExhausted("orders/0", 1_000_000),
    "GroupHeld": errors.GroupInUse("billing", 2, "a server"),
    "LocalError": errors.ProcessLimitError(errno.EMFILE, "Too many open files", "/s/t/0", appended=True),
    "NotShipped": errors.ShipUnconfirmed("orders/0", 10, 12, "no process ships this store"),
    "OtherInput": errors.InputMismatch("the input differs"),
    "ProducerHeld": errors.ProducerNameInUse("etl-1", "a client"),
}


@pytest.mark.parametrize(("name", "error"), FORMER.items())
def test_an_exception_has_its_former_name_too(name: str, error: Exception) -> None:
    """A program that catches an exception by its former name catches it, and its former pickles load."""
    assert getattr(errors, name) is type(error)
    assert getattr(segmentlog, type(error).__name__) is type(error)
    if name != "OtherInput":  # it was not in the package's own namespace
        assert getattr(segmentlog, name) is type(error)
    data = pickle.dumps(error, protocol=0)
    former = data.replace(
        f"csegmentlog.errors\n{type(error).__name__}\n".encode(), f"csegmentlog.errors\n{name}\n".encode()
    )
    assert former != data
    loaded = pickle.loads(former)
    assert type(loaded) is type(error)
    assert str(loaded) == str(error)


def test_former_arguments_and_methods_of_clients(store: LogStore) -> None:
    """``note``, `last_note`, `commit_positions` and ``on_bad`` do what their new names do."""
    store.create_topic("in", 1).partition(0).append([b"{}", b"x"])
    store.create_topic("out", 1)
    with (
        store.consumer("in", group="g", deserializer=segmentlog.json_codec(dict), on_bad="hand_over") as consumer,
        store.producer(name="p") as producer,
    ):
        records = consumer.poll(30.0)
        assert [type(record.value) for record in records] == [dict, segmentlog.Undecodable]
        with producer.transaction(note="1"):
            producer.send("out", b"done")
            producer.commit_positions(consumer)
        assert producer.last_note == producer.last_commit_metadata == "1"
        committed = consumer.committed("in")
        assert committed is not None
        assert committed.offset == 2
        with producer.transaction(commit_metadata="2"):
            producer.send("out", b"done")
        assert producer.last_note == "2"


def test_an_argument_cannot_be_given_under_both_names(store: LogStore) -> None:
    """Both names of an argument together raise `InvalidConfig`, so that neither is ignored."""
    store.create_topic("in", 1)
    with pytest.raises(InvalidConfig, match="on_error"):
        store.consumer("in", on_error="skip", on_bad="skip")
    with (
        store.producer() as producer,
        pytest.raises(InvalidConfig, match="commit_metadata"),
        producer.transaction("1", note="2"),
    ):
        pass


@pytest.mark.parametrize(("former", "name"), [("details", "describe"), ("retain", "apply-retention")])
def test_a_command_has_its_former_name_too(former: str, name: str) -> None:
    """A script that uses the former name of a command still works; the help lists the new name only."""
    runner = CliRunner()
    help_text = runner.invoke(cli, ["--help"]).output
    assert f"\n  {name} " in help_text
    assert f"\n  {former} " not in help_text
    assert (
        runner.invoke(cli, [former, "--help"]).output.split("\n", 3)[3]
        == (runner.invoke(cli, [name, "--help"]).output.split("\n", 3)[3])
    )


def test_former_members_of_public_classes() -> None:
    """`WireAppended.owes_sync`, `LogHandler.flushed` and `TopicConfig.kept_here_ms` mean what their new names mean."""
    assert segmentlog.WireAppended(0, 1, -1, 0, 1, True).owes_sync
    assert segmentlog.LogHandler.flushed is segmentlog.LogHandler.flush_within
    config = segmentlog.TopicConfig(retention_ms=7_000, local_retention_ms=3_000, retention_bytes=5_000)
    assert config.kept_here_ms == config.effective_local_retention_ms == 3_000
    assert config.kept_here_bytes == config.effective_local_retention_bytes == 5_000
