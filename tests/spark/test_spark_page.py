"""docs/spark.md: what it shows runs, what it names is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import segmentlog
from segmentlog.cli.spark_command import _COMMANDS
from segmentlog.spark.source_options import _READ, _WRITE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs/spark.md").read_text()


def test_the_examples_of_the_page_run(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The examples of the page run in their order, as a reader types them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        # Spark's driver has another working folder than this process by now.
        code = block.replace('"path", "data"', f'"path", "{tmp_path}/data"').replace('"checkpoints/', f'"{tmp_path}/')
        exec(compile(code, "spark.md", "exec"), names)
    spark.catalog.dropTempView("counts")


def test_the_example_for_python_runs(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs after the earlier examples, because it needs two topics of them."""
    monkeypatch.chdir(tmp_path)
    with segmentlog.open("data") as store:
        store.create_topic("clicks", partitions=4)
        store.create_topic("users", cleanup_policy="compact")
        with store.producer() as producer:
            producer.send_many("clicks", [b"/home", b"/cart", b"/pay"], keys=[b"user-1", b"user-1", b"user-2"])
    block = re.search(
        r"^```python spark\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert block is not None
    exec(compile(block[1].replace('"path", "data"', f'"path", "{tmp_path}/data"'), "python.md", "exec"), {})
    with segmentlog.open("data") as store, store.consumer("users", isolation="read_committed") as consumer:
        assert {(record.key, record.value) for record in consumer} == {
            (b"user-1", b"/HOME"), (b"user-1", b"/CART"), (b"user-2", b"/PAY"),
        }  # fmt: skip


def test_the_page_has_every_option() -> None:
    """The page names all options of the source and of the sink."""
    shown = set(re.findall(r"`([a-z][A-Za-z]+)`", TEXT))
    assert {*_READ, *_WRITE} <= shown


def test_the_page_has_every_command() -> None:
    """The page has each pipeline of `segmentlog spark`."""
    for name in _COMMANDS:
        assert f"`spark {name} " in TEXT, name
