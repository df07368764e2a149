"""`segmentlog ship`, `restore`, `replica`, `takeover` and `objects`, as typed; and stores that are URLs."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import xxhash
from waiting import wait_until

from segmentlog.cli.offsets_file import parse_offsets
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.takeover import take_over
from segmentlog.store import LogStore


class Shell:
    """Runs commands on the store ``store`` in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"file://{folder}/bucket"

    def command(self, *args: str, store: str = "store") -> list[str]:
        """Run a command."""
        return [sys.executable, "-m", "segmentlog", "--dir", str(self.folder / store), *args]

    def run(self, *args: str, store: str = "store", status: int = 0, stdin: str = "") -> tuple[str, str]:
        """(stdout, stderr) of a command, which has to end with this status."""
        done = subprocess.run(
            self.command(*args, store=store), capture_output=True, text=True, timeout=120, input=stdin, check=False
        )
        assert done.returncode == status, (args, done.returncode, done.stdout, done.stderr)
        return done.stdout, done.stderr

    def json(self, *args: str, store: str = "store", status: int = 0) -> list[dict[str, object]]:
        """Return the lines of JSON that a command prints."""
        return [json.loads(line) for line in self.run(*args, "--json", store=store, status=status)[0].splitlines()]

    def values(self, store: str) -> list[str]:
        """Return the values of a store's topic."""
        return [line.split()[-1] for line in self.run("consume", "words", store=store)[0].splitlines()]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Return a shell with a topic of three words."""
    made = Shell(tmp_path)
    made.run("create", "words")
    made.run("produce", "words", stdin="one\ntwo\nthree\n")
    return made


@pytest.mark.long
def test_there_and_back_again(shell: Shell) -> None:
    """A store is shipped, restored and taken over; new records follow, and the old owner is fenced."""
    (first,) = shell.json("ship", shell.url)
    assert first["records"] == 3
    assert "nothing new to ship" in shell.run("ship")[1], "the URL is known"
    shell.run("produce", "words", stdin="four\n")
    assert "1 more offsets" in shell.run("ship")[1]

    (restored,) = shell.json("restore", shell.url, str(shell.folder / "copy"))
    assert (restored["topics"], restored["partitions"]) == (1, 1)
    assert shell.values("copy") == ["one", "two", "three", "four"]
    assert "is a store" in shell.run("restore", shell.url, str(shell.folder / "copy"), status=1)[1]

    assert shell.run("topics", store="copy")[1] == "", "no warning for each command"
    assert shell.json("topics", store="copy")[0]["offsets"] == 4

    told = shell.run("takeover", shell.url, str(shell.folder / "other"))[1]
    assert "1 partitions resume after a gap" in told
    assert "machine death" not in told
    shell.run("produce", "words", stdin="five\n", store="other")
    assert "1 more offsets" in shell.run("ship", store="other")[1]
    assert shell.values("other") == ["one", "two", "three", "four", "five"]

    assert "taken over by" in shell.run("ship", status=1)[1]
    assert "taken over by" in shell.run("produce", "words", stdin="x\n", status=1)[1]
    assert shell.values("store") == ["one", "two", "three", "four"]
    assert "is shipped to" in shell.run("ship", shell.url + "-other", "--stop", status=2)[1]
    assert "whole store" in shell.run("ship", shell.url, "words", "--stop", status=2)[1]
    assert "taken over by" in shell.run("ship", status=1)[1], "neither has ended anything"
    assert "is no longer shipped" in shell.run("ship", shell.url, "--stop")[1]
    shell.run("produce", "words", stdin="alone\n")
    assert "was not shipped" in shell.run("ship", "--stop")[1]


def test_following_keeps_up_until_it_is_told_to_stop(shell: Shell) -> None:
    """When it is stopped, it ships the rest."""
    follower = subprocess.Popen(
        shell.command("ship", shell.url, "--follow", "--interval", "50ms", "--log-format", "json"),
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        with LogStore(shell.folder / "store") as store:
            log = store.topic("words").partition(0)
            wait_until(lambda: log.shipped_offset >= 3)
            log.append([b"four"], ack="shipped")
            log.append([b"five"], ack="durable")
        follower.send_signal(signal.SIGINT)
        _, told = follower.communicate(timeout=60)
        assert follower.returncode == 0, told
    finally:
        follower.kill()
        follower.communicate()
    lines = [json.loads(line) for line in told.splitlines()]
    assert {line["level"] for line in lines} == {"info"}
    said = [str(line["message"]) for line in lines]
    assert f"shipping to {shell.url}" in said[0]
    assert "shipped 3 offsets in 1 uploads" in said[1], said
    assert re.search(r"ended: 5 offsets in \d+ uploads; everything is uploaded", said[-1]), said
    shell.run("restore", shell.url, str(shell.folder / "copy"))
    assert shell.values("copy") == ["one", "two", "three", "four", "five"]


def test_only_the_topics_that_match(shell: Shell) -> None:
    """The options select topics for shipping and for restoring."""
    for name in ("orders-1", "orders-2", "other"):
        shell.run("create", name)
        shell.run("produce", name, stdin="x\n")
    shell.run("ship", shell.url, "orders*")
    shell.run("restore", shell.url, str(shell.folder / "copy"), "*-2")
    with LogStore(shell.folder / "copy", background=False) as store:
        assert store.topics() == ["orders-2"]


def test_what_a_small_ship_stored_is_listed(shell: Shell) -> None:
    """Its records are in the manifest: it is listed as an object with its size, and damage in it is found."""
    shell.run("ship", shell.url)
    listed, summary = shell.run("objects", "ls", shell.url)
    manifest = shell.folder / "bucket" / "manifest.json"
    assert re.search(
        rf"{manifest.stat().st_size:,}  manifest.json  the manifest, with \d+ bytes of records inline", listed
    )
    assert summary.startswith(f"1 objects, {manifest.stat().st_size:,} bytes, 1 topics")
    (row,) = shell.json("objects", "ls", shell.url)
    assert row["xxh3_64"] == xxhash.xxh3_64_hexdigest(manifest.read_bytes())
    assert "1 objects" in shell.run("objects", "verify", shell.url)[1]


@pytest.mark.long
def test_what_lies_there_is_listed_checked_and_tidied(shell: Shell) -> None:
    """Damage is found, with its key; unreferenced objects are deleted in two runs."""
    shell.run("create", "large")  # otherwise it is stored in the manifest
    shell.run("produce", "large", stdin=random.Random(1).randbytes(10_000).hex() + "\n")
    shell.run("ship", shell.url)
    tail, manifest = shell.json("objects", "ls", shell.url)
    assert (manifest["key"], manifest["what"]) == ("manifest.json", "the manifest")
    assert str(tail["key"]).startswith("tails/")
    assert shell.json("objects", "verify", shell.url) == []
    bucket = shell.folder / "bucket"
    stray = bucket / "tails" / "00000000000000000099-0123456789ab"
    stray.write_bytes(b"of a process that was killed")
    note = bucket / "note.txt"
    note.write_text("not ours")
    assert shell.json("objects", "gc", shell.url) == [], "it is young"
    wanted = {"key": "tails/00000000000000000099-0123456789ab", "done": "condemned", "dry_run": True}
    assert shell.json("objects", "gc", shell.url, "--grace", "0s", "--dry-run") == [wanted]
    assert shell.json("objects", "gc", shell.url, "--grace", "0s") == [{**wanted, "dry_run": False}]
    assert stray.exists()
    assert shell.json("objects", "gc", shell.url, "--grace", "0s") == [{**wanted, "dry_run": False, "done": "deleted"}]
    assert not stray.exists()
    assert note.exists()
    shell.run("produce", "words", stdin="four\n")
    assert "1 more offsets" in shell.run("ship")[1], "it goes on from the manifest that gc has put"

    object_ = bucket / str(shell.json("objects", "ls", shell.url)[0]["key"])
    object_.write_bytes(object_.read_bytes()[:-1])
    (problem,) = shell.json("objects", "verify", shell.url, status=3)
    assert problem["key"] == str(object_.relative_to(bucket))
    assert "manifest" in str(problem["problem"])
    error = shell.run("restore", shell.url, str(shell.folder / "copy"), status=1)[1]
    assert "the object is 1 bytes shorter than expected" in error
    object_.unlink()
    (problem,) = shell.json("objects", "verify", shell.url, status=3)
    assert "missing" in str(problem["problem"])
    assert object_.name in shell.run("restore", shell.url, str(shell.folder / "copy"), status=1)[1]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("ship",), "never shipped"),
        (("ship", "bucket"), "s3://"),
        (("ship", "ftp://host"), "ftp"),
        (("restore", "file:///nowhere/at/all", "x"), "no store was shipped to this URL"),
        (("takeover", "file:///nowhere/at/all", "x"), "no store was shipped to this URL"),
        (("objects", "ls", "file:///nowhere/at/all"), "no store was shipped to this URL"),
        (("objects", "gc", "file:///nowhere/at/all"), "no store was shipped to this URL"),
        (("objects", "verify", "file:///nowhere/at/all"), "no store was shipped to this URL"),
    ],
)
def test_what_cannot_be_done_says_why(shell: Shell, args: tuple[str, ...], why: str) -> None:
    """A rejected command prints one line, exits with a status above 0, and leaves no folder."""
    done = subprocess.run(
        shell.command(*args), capture_output=True, text=True, timeout=60, cwd=shell.folder, check=False
    )
    assert done.returncode in (1, 2)
    assert why in done.stderr
    assert not (shell.folder / "x").exists()


def test_a_folder_that_holds_something_else_is_left_alone(shell: Shell) -> None:
    """Restoring and taking over want one that is empty."""
    shell.run("ship", shell.url)
    folder = shell.folder / "mine"
    folder.mkdir()
    (folder / "letter").write_text("dear")
    for command in ("restore", "takeover"):
        assert "is not empty (it contains letter)" in shell.run(command, shell.url, str(folder), status=1)[1]
    assert [path.name for path in folder.iterdir()] == ["letter"]
    assert "owner's epoch 1" in shell.run("objects", "ls", shell.url)[1]


@pytest.mark.long
def test_a_forced_takeover_says_what_it_does_and_asks(shell: Shell) -> None:
    """On a terminal, takeover --force asks, with no as default; without a terminal it needs --yes."""
    shell.run("ship", shell.url)
    shell.run("ship", "--stop")
    shell.run("produce", "words", stdin="four\n")
    command = ("takeover", shell.url, str(shell.folder / "other"))
    assert "offsets a second time, to other records" in shell.run(*command, status=1)[1]
    told = shell.run(*command, "--force", status=2)[1]
    assert "assigns the offsets of those records a second time, to other records" in told
    assert "--yes" in told
    on_terminal = f"import pty, sys; sys.exit(pty.spawn({shell.command(*command, '--force')!r}) >> 8)"
    asked = subprocess.run(
        [sys.executable, "-c", on_terminal], input="\n", capture_output=True, text=True, timeout=120, check=False
    )
    assert "Take over and assign these offsets again? [y/N]" in asked.stdout
    assert asked.returncode == 1
    assert not any((shell.folder / "other").iterdir())
    assert "owner's epoch 1" in shell.run("objects", "ls", shell.url)[1]
    told = shell.run(*command, "--force", "--yes")[1]
    assert "a second time" in told
    assert shell.values("other") == ["one", "two", "three"]
    shell.run("produce", "words", stdin="five\n", store="other")
    again = shell.run("takeover", shell.url, str(shell.folder / "third"), "--force")[1]
    assert "warning" not in again, "its owner ships: nothing is forced"


@pytest.mark.long
def test_a_replica(shell: Shell) -> None:
    """A replica is updated once and again, reports its progress, is read-only, and belongs to one URL."""
    shell.run("ship", shell.url)
    copy = str(shell.folder / "copy")
    (told,) = shell.json("replica", shell.url, copy, "--once")
    assert (told["lag_records"], told["error"]) == (0, "")
    assert shell.values("copy") == ["one", "two", "three"]
    shell.run("produce", "words", stdin="four\n")
    shell.run("ship")
    shell.run("replica", shell.url, copy, "--once")
    assert shell.values("copy") == ["one", "two", "three", "four"]
    (told,) = shell.json("replica", shell.url, copy, "--status")
    assert told["url"] == shell.url
    assert "read-only" in shell.run("produce", "words", store="copy", stdin="x\n", status=1)[1]
    assert "is not a replica of" in shell.run("replica", shell.url + "2", copy, "--status", status=2)[1]
    assert "is a store" in shell.run("replica", shell.url, str(shell.folder / "store"), status=1)[1]
    assert "no store was shipped to this URL" in shell.run("replica", shell.url + "2", copy + "2", status=1)[1]


def test_a_replica_follows_until_it_is_interrupted(shell: Shell) -> None:
    """It gets new records as soon as they are shipped."""
    shell.run("ship", shell.url)
    follower = subprocess.Popen(
        shell.command("replica", shell.url, str(shell.folder / "copy"), "--interval", "50ms"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        shell.run("produce", "words", stdin="four\n")
        shell.run("ship")
        wait_until(lambda: (shell.folder / "copy" / "store.json").exists() and shell.values("copy")[-1:] == ["four"])
    finally:
        follower.send_signal(signal.SIGINT)
        said, _ = follower.communicate(timeout=60)
    assert follower.returncode == 0, said


def test_a_store_that_is_a_url(shell: Shell) -> None:
    """Every reading command can read a store at a URL."""
    shell.run("ship", shell.url)
    command = [sys.executable, "-m", "segmentlog", "--dir", shell.url]
    for args, wanted in ((["consume", "words"], "three"), (["topics"], "words"), (["describe", "words"], "words")):
        done = subprocess.run([*command, *args], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert wanted in done.stdout
    done = subprocess.run([*command, "produce", "words"], capture_output=True, text=True, timeout=120, check=False,
                          input="x\n")  # fmt: skip
    assert done.returncode == 1
    assert "read-only" in done.stderr


@pytest.mark.long
def test_back_to_a_time_and_to_offsets(shell: Shell) -> None:
    """Later records are omitted, and reported; offsets come in the formats of Kafka's tools, or from stdin."""
    shell.run("ship", shell.url)
    time.sleep(0.01)
    between = f"@{time.time_ns() // 1_000_000}"
    time.sleep(0.01)
    shell.run("produce", "words", stdin="four\nfive\n")
    shell.run("ship")
    assert (
        "words/0: offsets 3 to 4 are left out\n"
        in (shell.run("restore", shell.url, str(shell.folder / "then"), "--at", between)[1])
    )
    assert shell.values("then") == ["one", "two", "three"]
    shell.run("produce", "words", stdin="six\n", store="then")
    assert shell.values("then") == ["one", "two", "three", "six"]
    (details,) = (
        line for line in shell.run("describe", "words", store="then")[0].splitlines() if "left out by" in line
    )
    assert "3" in details

    kafka = shell.folder / "offsets.json"
    kafka.write_text('{"partitions": [{"topic": "words", "partition": 0, "offset": 1}], "version": 1}')
    (done,) = shell.json("restore", shell.url, str(shell.folder / "one"), "--offsets", str(kafka))
    assert done["cuts"] == [{"topic": "words", "partition": 0, "offset": 1, "end_offset": 5, "wanted_offset": 1}]
    assert shell.values("one") == ["one"]
    for number, text in enumerate(("# it was so\nwords 0 2\n", "words,0,2\n", "words:0:2")):
        shell.run("restore", shell.url, str(shell.folder / f"two-{number}"), "--offsets", "-", stdin=text)
        assert shell.values(f"two-{number}") == ["one", "two"]
    whole = shell.run("restore", shell.url, str(shell.folder / "whole"), "--at", "2100-01-01")[1]
    assert "left out" not in whole
    assert len(shell.values("whole")) == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it names no partition"),
        ("words 0\n", "line 1 is 'words 0'; expected TOPIC PARTITION OFFSET"),
        ("words 0 1\nwords 0 2\n", "line 2: words/0 appears twice"),
        ("words 0 -1\n", "line 1: -1 is not a valid offset of words/0"),
        ("words 0 1 2\n", "line 1 is"),
        ("words x 1\n", "line 1 is"),
        ('{"partitions": [{"topic": "words", "partition": 0}]}', "missing required field `offset`"),
        ('{"partitions": [], "version": 2}', "unsupported version 2; expected version 1"),
    ],
)
def test_offsets_that_make_no_sense(text: str, words: str) -> None:
    """The error names the line or the partition."""
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_offsets(text.encode())


def test_options_that_make_no_sense(shell: Shell) -> None:
    """The error comes before any request to the object store."""
    broken = shell.folder / "broken"
    broken.write_text("words 0\n")
    for arguments, words in (
        (("--at", "-1h", "--offsets", "-"), "exclude each other"),
        (("--at", "17"), "--at: give a time"),
        (("--at", "yesterday"), "is not an offset or a time"),
        (("--offsets", "nowhere"), "No such file"),
        (("--offsets", str(broken)), "broken: line 1 is 'words 0'"),
    ):
        said = shell.run("restore", shell.url, str(shell.folder / "copy"), *arguments, status=2, stdin="words 0 1")[1]
        assert words in said
    assert not (shell.folder / "copy").exists()
    shell.run("ship", shell.url)
    for text, words in (
        ("words 0 9", "words/0 cannot be cut at offset 9"),
        ("word 0 1", "word/0: the topic is not among"),
    ):
        said = shell.run("restore", shell.url, str(shell.folder / "copy"), "--offsets", "-", status=1, stdin=text)[1]
        assert words in said


@pytest.mark.long
def test_a_url_in_place_of_a_folder(shell: Shell) -> None:
    """Reading commands accept a URL, writing commands report an error; no folder with the URL's name is created."""
    shell.run("ship", shell.url)

    def run(*args: str, status: int = 0) -> tuple[str, str]:
        command = [sys.executable, "-m", "segmentlog", "--dir", shell.url, *args]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False,
            cwd=shell.folder,
        )  # fmt: skip
        assert done.returncode == status, (args, done.returncode, done.stdout, done.stderr)
        return done.stdout, done.stderr

    before = sorted(path.name for path in shell.folder.iterdir())
    assert [line.split()[-1] for line in run("consume", "words")[0].splitlines()] == ["one", "two", "three"]
    assert "words" in run("topics")[0]
    for args in (("verify",), ("verify", "words")):
        told, said = run(*args)
        assert (told, "no damage" in said, "3 records" in said) == ("", True, True)
    assert "it does not exist" in run("verify", "nothing", status=1)[1]
    for args in (("serve",), ("users", "list"), ("users", "add", "me"), ("bench",), ("repair", "-n")):
        assert "a store in an object store is read-only" in run(*args, status=2)[1]
    for args in (("produce", "words"), ("create", "new"), ("delete", "words", "--yes"), ("retain", "words")):
        said = run(*args, status=1)[1]
        assert f"{shell.url}: cannot" in said
        assert "read-only" in said
    assert sorted(path.name for path in shell.folder.iterdir()) == before


def test_a_replica_has_files_of_its_own(shell: Shell) -> None:
    """Verify accepts them."""
    shell.run("ship", shell.url)
    shell.run("replica", shell.url, str(shell.folder / "copy"), "--once")
    assert shell.run("verify", store="copy")[0] == ""


@pytest.mark.long
def test_a_hand_over_that_no_machine_takes(shell: Shell) -> None:
    """The command reports it with status 1, and the store continues."""
    shell.run("ship", shell.url)
    error = shell.run("takeover", "--hand-over", "--wait", "300ms", status=1)[1]
    assert "was not handed over: no machine took it over within 0.3 s. This machine is still its owner" in error
    shell.run("produce", "words", stdin="four\n")
    assert "1 more offsets" in shell.run("ship")[1]


@pytest.mark.long
def test_a_hand_over_to_another_machine(shell: Shell) -> None:
    """The command names the new owner, which leaves out no offset."""
    shell.run("ship", shell.url)
    bucket = open_bucket(shell.url)
    other = str(shell.folder / "other")

    def take() -> None:
        while not require_manifest(bucket)[0].is_handed_over:
            time.sleep(0.01)
        take_over(bucket, other, parallel=0)

    standby = threading.Thread(target=take)
    standby.start()
    (done,) = shell.json("takeover", shell.url, "--hand-over")
    standby.join()
    assert "(owner's epoch 2)" in str(done["owner"])
    assert "taken over by" in shell.run("takeover", "--hand-over", status=1)[1]
    assert "taken over by" in shell.run("produce", "words", stdin="never\n", status=1)[1]
    shell.run("ship", store="other")
    shell.run("produce", "words", stdin="four\n", store="other")
    assert [line["offset"] for line in shell.json("consume", "words", store="other")] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--hand-over", "file:///x", "folder"), "give no FOLDER"),
        (("--hand-over", "--force"), "give no FOLDER"),
        (("--hand-over", "file:///somewhere/else"), "this store was never shipped"),
        ((), "give URL and FOLDER"),
        (("file:///x",), "give URL and FOLDER"),
    ],
)
def test_arguments_of_takeover_that_do_not_fit(shell: Shell, arguments: tuple[str, ...], told: str) -> None:
    """They are refused before anything happens."""
    assert told in shell.run("takeover", *arguments, status=2)[1]
