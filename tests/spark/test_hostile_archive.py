"""A manifest may name only files in its own folder: no file outside is read, moved or overwritten.

All checks here come before a Spark session is needed.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import segmentlog
from segmentlog.cli import cli
from segmentlog.cli.common import EXIT_DAMAGE, run
from segmentlog.errors import SegmentlogError, UnknownTopic
from segmentlog.format.file_names import check_relative_path
from segmentlog.spark.offset_ranges import decode_positions
from segmentlog.spark.pipelines.archive_folder import ArchiveDamaged, ArchiveFolder
from segmentlog.spark.pipelines.output_folders import compute_checksum
from segmentlog.spark.pipelines.table_folder import FORMAT, TableFile, TableFolder, TableState
from segmentlog.storage.file_operations import replace_file
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.untrusted_folder import UntrustedPath, open_plain, path_below, read_plain

DAY = "date=2026-07-31"
RUN = "000001-0011aabb"
FILE = f"{DAY}/part-{RUN}-00000.parquet"
SECRET = b"what others must not see or lose"

LEADING_OUT = [
    "../secret", "../../secret", f"{DAY}/../../../secret", "/secret", "//secret", f"{DAY}//x.parquet", "..",
    ".", "", f"{DAY}/", "./x.parquet", f"{DAY}/./x", "a\0b", f"{DAY}/x\n.parquet", "\x1b[2J", "\ud800",
    f"{DAY}/{'x' * 300}", "a/" * 100 + "a", "_segmentlog/manifest.json", "_segmentlog/lock", f"{DAY}/_x.parquet",
    f"{DAY}/.hidden", "x/..",
]  # fmt: skip


def manifest_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the manifest of an archive with one file, and create the file."""
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"rows")
    digest = {"records": 1, "first_offset": 0, "last_offset": 0, "checksum": "0" * 32}
    run = {
        "id": RUN, "at_ms": 1, "ranges": [{"partition": 0, "start": 0, "end": 1, "digest": digest}],
        "files": [{"path": FILE, "size_bytes": 4, "checksum": compute_checksum(str(path))}],
    }  # fmt: skip
    partition = {"partition": 0, "start": 0, "end": 1, "gaps": [], "mark": None}
    return {
        "format": 1, "topic": "t", "store_id": "s", "partition_count": 1, "partitions": [partition], "runs": [run],
        "intent": None, **changes,
    }  # fmt: skip


def write(folder: Path, document: Any) -> ArchiveFolder:
    """Return the archive with this manifest."""
    own = folder / "_segmentlog"
    own.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document) if not isinstance(document, bytes) else None
    (own / "manifest.json").write_bytes(document if text is None else text.encode("utf-8", "surrogatepass"))
    return ArchiveFolder(str(folder))


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """Yield a file next to the archive; check at the end that it and a folder next to it are unchanged."""
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    (tmp_path / "elsewhere").mkdir()
    yield secret
    assert secret.read_bytes() == SECRET
    assert os.stat(secret).st_nlink == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


def intent_of(document: dict[str, Any], source: str, target: str) -> dict[str, Any]:
    """Return the manifest with a run that is about to be moved."""
    run = document["runs"][0]
    run = {**run, "id": "000002-0011aabb", "files": [{**run["files"][0], "path": target}]}
    return {**document, "intent": {"run": run, "sources": [source], "partitions": document["partitions"]}}


def test_a_manifest_that_is_one(tmp_path: Path) -> None:
    """A manifest that the library wrote passes all checks."""
    archived = write(tmp_path / "a", manifest_of(tmp_path / "a"))
    manifest = archived.existing()
    archived.check_files(manifest.runs)
    assert archived.paths(manifest.runs) == [str(tmp_path / "a" / FILE)]
    document = intent_of(manifest_of(tmp_path / "a"), f"{DAY}/part-00000.zstd.parquet", f"{DAY}/part-2.parquet")
    archived = write(tmp_path / "a", document)
    source = tmp_path / "a/_segmentlog/run-000002-0011aabb" / DAY / "part-00000.zstd.parquet"
    source.parent.mkdir(parents=True)
    source.write_bytes(b"more")
    done = archived.finish(archived.existing(), lambda step: None)
    assert [run.id for run in done.runs] == [RUN, "000002-0011aabb"]
    assert (tmp_path / "a" / DAY / "part-2.parquet").read_bytes() == b"more"
    assert ArchiveFolder(str(tmp_path / "a")).existing() == done


@pytest.mark.parametrize("name", LEADING_OUT)
@pytest.mark.parametrize("where", ["file", "source", "target", "run"])
def test_names_that_lead_elsewhere(tmp_path: Path, outside: Path, where: str, name: str) -> None:
    """The error has the manifest, the name, and the remedy, and comes before any file is read or changed."""
    document = manifest_of(tmp_path / "a")
    if where == "file":
        document["runs"][0]["files"][0]["path"] = name
    elif where == "run":
        document["runs"][0]["id"] = name
    else:
        document = intent_of(document, name if where == "source" else "x", name if where == "target" else "y")
    archived = write(tmp_path / "a", document)
    with pytest.raises(ArchiveDamaged) as caught:
        archived.existing()
    if name != "\ud800":  # JSON text cannot hold a lone surrogate
        assert repr(name) in str(caught.value)
        assert "restore it from a backup" in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/a/_segmentlog/manifest.json: ")
    assert check_relative_path(name)
    with pytest.raises(UntrustedPath):
        path_below(str(tmp_path), name)


def changed(document: dict[str, Any], *keys: Any, value: Any) -> dict[str, Any]:
    """Return the manifest with another value in one place."""
    document = json.loads(json.dumps(document))
    place = document
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return document


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("partition_count",), 0), (("partition_count",), 10**9), (("topic",), "../t"), (("topic",), ""),
        (("partitions", 0, "partition"), -1), (("partitions", 0, "partition"), 1), (("partitions", 0, "end"), -1),
        (("partitions", 0, "end"), 2**62), (("partitions", 0, "start"), -5), (("partitions", 0, "gaps"), [[5, 3]]),
        (("partitions", 0, "gaps"), [[0, 99]]), (("runs", 0, "ranges", 0, "partition"), 7),
        (("runs", 0, "ranges", 0, "end"), 2**62), (("runs", 0, "ranges", 0, "digest", "checksum"), "zz"),
        (("runs", 0, "ranges", 0, "digest", "records"), -1), (("runs", 0, "files", 0, "size_bytes"), -1),
        (("runs", 0, "files", 0, "checksum"), "x" * 32), (("format",), 99), (("runs", 0, "largest_batch_bytes"), -1),
        (("runs", 0, "largest_batch_bytes"), 2**40), (("runs",), {}), (("runs", 0, "id"), "a b"),
    ],
)  # fmt: skip
def test_numbers_that_no_log_has(tmp_path: Path, keys: tuple[Any, ...], value: object) -> None:
    """The manifest is refused with one sentence, before it fills memory with gaps or a billion partitions."""
    document = changed(manifest_of(tmp_path / "a"), *keys, value=value)
    with pytest.raises(SegmentlogError, match=r"manifest\.json: "):
        write(tmp_path / "a", document).existing()


def test_names_that_are_given_twice(tmp_path: Path) -> None:
    """A run must not overwrite its own files, and a partition or a source must not occur twice."""
    document = manifest_of(tmp_path / "a")
    file, partition = document["runs"][0]["files"][0], document["partitions"][0]
    twice = intent_of(document, "x", FILE)
    sources = intent_of(document, "x", "y")
    sources["intent"]["run"]["files"].append({**file, "path": "z"})
    short = json.loads(json.dumps(sources))
    sources["intent"]["sources"].append("x")
    for one in (
        changed(document, "runs", 0, "files", value=[file, file]), twice, sources, short,
        changed(document, "partitions", value=[partition, partition]),
    ):  # fmt: skip
        with pytest.raises(ArchiveDamaged, match=r"twice|already in the manifest|2 files"):
            write(tmp_path / "a", one).existing()


@pytest.mark.parametrize("text", [b"", b"{}", b"[" * 100_000, b'{"format": 1', b"\xff", b"null"])
def test_what_is_no_manifest(tmp_path: Path, text: bytes) -> None:
    """The error is one of the library's, without a traceback."""
    with pytest.raises(ArchiveDamaged, match="it is not a manifest"):
        write(tmp_path / "a", text).existing()


# ---------------------------------------------------------------- links, pipes, devices


def place(kind: str, path: Path, target: Path) -> None:
    """Put a file that is not regular at a path."""
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(target)
    elif kind == "dangling link":
        path.symlink_to(target.parent / "elsewhere" / "made")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(os.path.relpath(path))
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


KINDS = ["link", "dangling link", "pipe", "socket", "device", "folder"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_none(tmp_path: Path, outside: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are not followed, pipes do not block, devices are not read, as a file, as the manifest, or as the lock."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a"
    document = manifest_of(folder)
    document["runs"][0]["files"][0] |= {"size_bytes": len(SECRET), "checksum": compute_checksum(str(outside))}
    archived = write(folder, document)
    manifest = archived.existing()
    place(kind, folder / FILE, outside)
    with pytest.raises(ArchiveDamaged, match=f"{FILE}: it is .*; run {RUN} archived"):
        archived.check_files(manifest.runs)
    with pytest.raises((UntrustedPath, FileNotFoundError)):
        open_plain(FileSystem(), str(folder / FILE))
    for name in ("lock", "manifest.json"):
        place(kind, folder / "_segmentlog" / name, outside)
        with pytest.raises(SegmentlogError, match=f"{name}: it is"), archived.writing():
            archived.existing()
        (folder / "_segmentlog/lock").is_dir() and (folder / "_segmentlog/lock").rmdir()
        (folder / "_segmentlog/lock").unlink(missing_ok=True)


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_what_waits_under_the_name_of_a_temporary_file(
    tmp_path: Path, outside: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next manifest is not written through it."""
    monkeypatch.chdir(tmp_path)
    archived = write(tmp_path / "a", manifest_of(tmp_path / "a"))
    place(kind, tmp_path / "a/_segmentlog/manifest.json.tmp", outside)
    with archived.writing():
        archived.write(archived.existing())
    os.link(outside, tmp_path / "a/_segmentlog/manifest.json.tmp")
    with archived.writing():
        archived.write(archived.existing())
    archived.existing()


def test_a_temporary_name_that_is_a_link_is_not_written_through(tmp_path: Path, outside: Path) -> None:
    """This holds for each file that is replaced."""
    (tmp_path / "checkpoint.tmp").symlink_to(outside)
    with pytest.raises(OSError, match="symbolic link"):
        replace_file(FileSystem(), str(tmp_path / "checkpoint"), b"new")


@pytest.mark.parametrize("which", [DAY, "_segmentlog", "_segmentlog/run-000002-0011aabb", "run/day"])
def test_folders_that_are_links(tmp_path: Path, outside: Path, which: str) -> None:
    """Files in their targets are not read, replaced or removed."""
    folder = tmp_path / "a"
    document = intent_of(manifest_of(folder), f"{DAY}/source.parquet", f"{DAY}/target.parquet")
    archived = write(folder, document)
    taken = tmp_path / "theirs"
    taken.mkdir()
    (taken / "run-mine").mkdir()
    (taken / "source.parquet").write_bytes(SECRET)
    (taken / DAY).mkdir()
    (taken / DAY / "source.parquet").write_bytes(SECRET)
    run = folder / "_segmentlog/run-000002-0011aabb"
    if which == "_segmentlog":
        (folder / "_segmentlog/manifest.json").rename(taken / "manifest.json")
        (folder / "_segmentlog").rmdir()
        (folder / "_segmentlog").symlink_to(taken)
    elif which == "run/day":
        run.mkdir()
        (run / DAY).symlink_to(taken)
    elif which == DAY:
        (run / DAY).mkdir(parents=True)
        (run / DAY / "source.parquet").write_bytes(b"rows")
        (folder / FILE).unlink()
        (folder / DAY).rmdir()
        (folder / DAY).symlink_to(taken)
    else:
        run.symlink_to(taken)
    before = {path: path.read_bytes() for path in taken.rglob("*") if path.is_file()}
    with pytest.raises(SegmentlogError, match="symbolic link"), archived.writing():
        archived.finish(archived.existing(), lambda step: None)
    assert {path: path.read_bytes() for path in taken.rglob("*") if path.is_file()} == before
    if which != "_segmentlog":
        archived.sweep()  # removes the link, but not its target
        assert {path: path.read_bytes() for path in taken.rglob("*") if path.is_file()} == before


def test_a_source_that_is_a_link_is_not_moved_in(tmp_path: Path, outside: Path) -> None:
    """Otherwise the archive would contain it from then on."""
    archived = write(tmp_path / "a", intent_of(manifest_of(tmp_path / "a"), "source", "target"))
    run = tmp_path / "a/_segmentlog/run-000002-0011aabb"
    run.mkdir()
    (run / "source").symlink_to(outside)
    with pytest.raises(ArchiveDamaged, match="symbolic link"):
        archived.finish(archived.existing(), lambda step: None)
    assert (run / "source").is_symlink()


def test_a_file_without_end(tmp_path: Path) -> None:
    """A manifest of more bytes than any has is not read into memory."""
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UntrustedPath, match="at most; it was not read"):
        read_plain(FileSystem(), str(path), 1 << 20)
    assert read_plain(FileSystem(), __file__, 1 << 20) == Path(__file__).read_bytes()


# ---------------------------------------------------------------- the other files that name files


def table_state(**changes: Any) -> TableState:
    """Return the state of a table of one file."""
    files = [TableFile("bucket-00000-00000-v000001.parquet", 0, 1)]
    return msgspec.structs.replace(TableState(FORMAT, 1, "t", "s", 8, None, {0: 1}, {}, files), **changes)


def write_table(base: Path, state: TableState) -> TableFolder:
    """Write a table that is in this state."""
    version = base / ".table.versions/v000001"
    version.mkdir(parents=True, exist_ok=True)
    (version / "_segmentlog.json").write_bytes(msgspec.json.encode(state))
    (version / "bucket-00000-00000-v000001.parquet").write_bytes(b"rows")
    if not (base / "table").is_symlink():
        (base / "table").symlink_to(".table.versions/v000001")
    return TableFolder(str(base / "table"))


@pytest.mark.parametrize("name", [*LEADING_OUT[:-9], "other.parquet", "bucket-00000-00000-v000001.parquet/../../x"])
def test_a_table_whose_state_names_other_files(tmp_path: Path, outside: Path, name: str) -> None:
    """Such files are not linked into the next version, and Spark does not read them."""
    if "\ud800" in name:
        return
    assert write_table(tmp_path, table_state()).read() == table_state()
    folder = write_table(tmp_path, table_state(files=[TableFile(name, 0, 1)]))
    with pytest.raises(SegmentlogError, match=r"_segmentlog\.json: it names the file .*--rebuild"):
        folder.read()


def test_a_table_with_links_in_place_of_files(tmp_path: Path, outside: Path) -> None:
    """Links in place of a file, the state, a version or all versions are not followed."""
    folder = write_table(tmp_path, table_state())
    state = folder.read()
    assert state is not None
    path = tmp_path / ".table.versions/v000001/bucket-00000-00000-v000001.parquet"
    assert folder.paths(state, {0}) == [str(path)]
    path.unlink()
    path.symlink_to(outside)
    with pytest.raises(UntrustedPath, match="symbolic link"):
        folder.paths(state, {0})
    (path.parent / "_segmentlog.json").rename(tmp_path / "state")
    (path.parent / "_segmentlog.json").symlink_to(tmp_path / "state")
    with pytest.raises(SegmentlogError, match="symbolic link"):
        folder.read()
    path.parent.rename(tmp_path / "moved")
    path.parent.symlink_to(tmp_path / "moved")
    with pytest.raises(SegmentlogError, match="symbolic link"):
        folder.read()
    (tmp_path / ".table.versions").rename(tmp_path / "versions")
    (tmp_path / ".table.versions").symlink_to(tmp_path / "versions")
    with pytest.raises(SegmentlogError, match="symbolic link"), folder.writing():
        pass


@pytest.mark.parametrize("name", ["../other/t", "/tmp", "..", "", "a/b", "t\0", "@staging"])
def test_topics_that_a_checkpoint_names(tmp_path: Path, name: str) -> None:
    """A query's checkpoint, or whatever else names a topic, leads to no partition outside the store."""
    with segmentlog.open(tmp_path / "other" / "store", background=False) as store:
        store.create_topic("t")
    with segmentlog.open(tmp_path / "store", background=False) as store:
        with pytest.raises(UnknownTopic):
            store.open_partition(name, 0)
        with pytest.raises(UnknownTopic):
            store.open_partition("../other/store/t", 0)
    with pytest.raises(SegmentlogError, match="checkpoint"):
        decode_positions({name: {"0": 1}})


@pytest.mark.parametrize(
    "document",
    [{"t": {"-1": 1}}, {"t": {"0": -5}}, {"t": {"x": 1}}, {"t": 5}, {"t": {"0": None}}, {"t": {"0": 1, "id": "../t"}}],
)
def test_offsets_of_a_checkpoint_that_are_none(document: Any) -> None:
    """The error is one sentence."""
    with pytest.raises(SegmentlogError, match="from a backup"):
        decode_positions(document)


def test_the_command_line_tells_before_spark_is_started(
    tmp_path: Path, outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`restore` exits with 3 for an archive that names what is not its own."""
    document = intent_of(manifest_of(tmp_path / "a"), "../../../secret", "x")
    write(tmp_path / "a", document)
    segmentlog.open(tmp_path / "store").close()
    assert run(cli, ["--dir", str(tmp_path / "store"), "spark", "restore", str(tmp_path / "a"), "t"]) == EXIT_DAMAGE
    told = capsys.readouterr().err
    assert "'../../../secret'" in told
    assert "manifest.json" in told
