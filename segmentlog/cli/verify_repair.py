"""``segmentlog verify`` and ``segmentlog repair``."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from segmentlog.cli.common import EXIT_DAMAGE, EXIT_DONE, EXIT_UNREADABLE, say, store_folder
from segmentlog.cli.dump_command import dump as dump
from segmentlog.cli.option_types import complete_topic, json_option
from segmentlog.errors import UnknownTopic

if TYPE_CHECKING:
    from segmentlog.inspection.finding import Finding, Tally
    from segmentlog.inspection.partition_findings import PartitionFindings
    from segmentlog.log.repair.partition_repair import RepairReport
    from segmentlog.storage.fs import FileSystem

_COLOURS = {"damage": "red", "unreadable": "magenta", "warning": "yellow", "note": "bright_black"}


# ---------------------------------------------------------------- verify


@click.command()
@click.argument("topic", required=False, shell_complete=complete_topic)
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Leave out notes: what is harmless.")
@click.option("--strict", is_flag=True, help="Exit with 3 for warnings, too: any wrong byte, even in a cache.")
@click.pass_context
def verify(ctx: click.Context, topic: str | None, as_json: bool, quiet: bool, strict: bool) -> int:
    """Check every checksum, index and invariant of the store, or of one topic.

    Changes nothing, takes no lock, and works while others append and on a store that does not
    open. Prints one line a finding:

    \b
      damage      bytes are not what was written, or records are missing without a reason
      unreadable  a batch is what was written, and its records do not decode: readers stop at it
      warning     a cache is wrong; no record is affected
      note        harmless: what a crash left behind, files that nobody knows

    Exits with 3 when there is damage; 'segmentlog repair' cuts it out. Exits with 4 when there is no
    damage and a batch is unreadable: no disk is to blame, a client sent it like that, and only
    'segmentlog repair --drop-unreadable' removes it. Indexes are never fsynced, so a power cut may
    leave warnings where no disk is to blame.
    """
    from segmentlog.inspection.store_inspection import inspect_store, size_of

    with store_files(ctx, topic) as (fs, path):
        topics = check_topics(fs, path, topic)
        started = time.perf_counter()
        with progress_of_bytes(size_of(fs, path, topics), "verifying") as tally:
            counts = tell_findings(inspect_store(path, topic, fs=fs, tally=tally), as_json=as_json, quiet=quiet)
    return tell_verdict(counts, tally.counts(), time.perf_counter() - started, strict=strict)


def tell_findings(findings: Iterable[Finding], *, as_json: bool, quiet: bool) -> dict[str, int]:
    """Print each; how many there are of each severity."""
    from segmentlog.cli.table_output import show_json

    counts = {"damage": 0, "unreadable": 0, "warning": 0, "note": 0}
    for finding in findings:
        counts[finding.severity] += 1
        if as_json:
            show_json(finding)
        elif not (quiet and finding.severity == "note"):
            click.echo(_line(finding))
    return counts


def tell_verdict(counts: dict[str, int], tally: tuple[int, int, int, int, int], seconds: float, *, strict: bool) -> int:
    """Say what was looked at (as `Tally.counts` has it), and what came out; the exit status."""
    partitions, segments, batches, records, size_bytes = tally
    say(
        f"{partitions:,} partitions, {segments:,} segments, {batches:,} batches,"
        f" {records:,} records, {size_bytes:,} bytes in {seconds:.2f} s"
        f" ({size_bytes / max(seconds, 1e-9) / 1e6:.0f} MB/s)"
    )
    say(_verdict(counts))
    if counts["damage"] or (strict and counts["warning"]):
        return EXIT_DAMAGE
    return EXIT_UNREADABLE if counts["unreadable"] else EXIT_DONE


def _verdict(counts: dict[str, int]) -> str:
    names = {"unreadable": "unreadable batch" if counts["unreadable"] == 1 else "unreadable batches"}
    names |= {name: name if counts[name] == 1 else f"{name}s" for name in ("warning", "note")}
    told = [f"{count} {names.get(name, name)}" for name, count in counts.items() if count]
    if counts["damage"]:
        return f"{', '.join(told)}: 'segmentlog repair --dry-run' says what can be saved"
    if counts["unreadable"]:
        return f"no damage, {', '.join(told)}: 'segmentlog repair --drop-unreadable --dry-run' says what would be lost"
    return f"no damage ({', '.join(told)})" if told else "no damage"


def _line(finding: Finding) -> str:
    severity, _, rest = str(finding).partition(": ")
    return f"{click.style(severity, fg=_COLOURS[severity], bold=severity == 'damage')}: {rest}"


@contextlib.contextmanager
def store_files(ctx: click.Context, topic: str | None) -> Iterator[tuple[FileSystem, str]]:
    """By what, and where, the files of ``--dir`` are reached, or those of a topic of it."""
    from segmentlog.objects.bucket.url import is_url
    from segmentlog.objects.replica.remote_store import open_store_files

    path = ctx.obj if is_url(ctx.obj) else os.path.abspath(ctx.obj)
    with open_store_files(path, () if topic is None else (topic,)) as found:
        yield found


def check_topics(fs: FileSystem, path: str, topic: str | None) -> list[str]:
    """All topics, or the one that was asked for. Raises `UnknownTopic`, `StoreVersionError`."""
    from segmentlog.inspection.store_inspection import list_topics

    names = list_topics(fs, path)
    if topic is None:
        return names
    if topic not in names:
        import difflib

        close = difflib.get_close_matches(topic, names, n=1)
        advice = f"did you mean {close[0]!r}?" if close else "'segmentlog topics' lists those that do"
        raise UnknownTopic(topic, f"it does not exist; {advice}")
    return [topic]


@contextlib.contextmanager
def progress_of_bytes(total_bytes: int, what: str) -> Iterator[Tally]:
    """A tally that moves a progress bar, when there is a terminal to draw it on."""
    from segmentlog.inspection.finding import Tally

    if not sys.stderr.isatty():
        yield Tally()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    # Not redirected: findings would go to stderr, whatever stdout is.
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield Tally(lambda size_bytes: progress.advance(task, size_bytes))


# ---------------------------------------------------------------- repair


@click.command()
@click.argument("topic", required=False, shell_complete=complete_topic)
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--drop-unreadable",
    is_flag=True,
    help="Also cut out batches whose checksum is right and whose records do not decode.",
)
@json_option
@click.pass_context
def repair(
    ctx: click.Context, topic: str | None, dry_run: bool, yes: bool, drop_unreadable: bool, as_json: bool
) -> int:  # fmt: skip
    """Cut the damage out of the store, or of one topic, and nothing else.

    Damaged bytes go to the partition's quarantine folder. The offsets that go with them become
    a lost range: a reader inside it is told so, others step over it, and no record is ever
    given one of them. Indexes are made anew; a damaged checkpoint is written anew.

    A batch is unreadable when its checksum is right and its records do not decode: it is what a client
    sent, and was acknowledged. Repair leaves it, unless --drop-unreadable asks for its removal; it goes
    to quarantine like damaged bytes. Look with --dry-run first: it says which offsets and how many
    announced records would be lost. To only pass such batches, read with --skip-damaged.

    Other processes may go on: appends wait while a partition is being repaired. Exits with 3
    when there is damage that cannot be repaired, and after --dry-run when there is any; else with 4 when
    unreadable batches are left.
    """
    from segmentlog.objects.tier.remote_reader import remote_segments_readable
    from segmentlog.storage.fs import FileSystem

    path = os.path.abspath(store_folder(ctx))
    with remote_segments_readable(FileSystem()) as fs:
        return _mend(fs, path, topic, dry_run=dry_run, yes=yes, drop_unreadable=drop_unreadable, as_json=as_json)


def _mend(
    fs: FileSystem, path: str, topic: str | None, *, dry_run: bool, yes: bool, drop_unreadable: bool, as_json: bool
) -> int:
    """Look, tell, ask, and repair."""
    from segmentlog.inspection.store_inspection import inspect_partitions, size_of
    from segmentlog.log.repair.partition_repair import plan_repair

    topics = check_topics(fs, path, topic)
    now_ms = time.time_ns() // 1_000_000
    planned: list[tuple[PartitionFindings, RepairReport]] = []
    with progress_of_bytes(size_of(fs, path, topics), "looking") as tally:
        for name in topics:
            for found in inspect_partitions(fs, path, name, tally):
                plan = plan_repair(found, now_ms, drop_unreadable=drop_unreadable)
                if plan.does_anything or found.is_damaged or found.unreadable:
                    planned.append((found, plan))
    to_do = [(found, plan) for found, plan in planned if plan.does_anything]
    left = [found for found, _ in planned]
    if to_do and (dry_run or not yes):
        for found, plan in to_do:
            _tell(found, plan, as_json=as_json and dry_run, done=False)
    if not to_do:
        say("there is nothing that a repair could mend")
    elif not dry_run:
        if not yes:
            _ask()
        left = []
        for found, plan in planned:
            if plan.does_anything:
                report = _repair(fs, path, found, drop_unreadable=drop_unreadable)
                _tell(found, report, as_json=as_json, done=True)
            left.append(_look_again(fs, path, found))
    is_planned = dry_run and bool(to_do)
    findings = [finding for found in left for finding in found.findings]
    damage = [finding for finding in findings if finding.severity == "damage"]
    unreadable = [finding for finding in findings if finding.severity == "unreadable"]
    status = _tell_left(
        fs, path, topics, [] if is_planned else damage, [] if dry_run and drop_unreadable else unreadable, as_json
    )
    if damage:
        return EXIT_DAMAGE
    return status or (EXIT_UNREADABLE if unreadable else EXIT_DONE)


def _ask() -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("there is no terminal to ask on: add --yes to repair, --dry-run to look")
    click.confirm("Repair?", abort=True, err=True)


def _repair(fs: FileSystem, path: str, found: PartitionFindings, *, drop_unreadable: bool) -> RepairReport:
    from segmentlog.inspection.small_files import read_topic_file
    from segmentlog.log.repair.partition_repair import repair_partition

    folder = f"{path}/{found.topic}"
    return repair_partition(
        fs, found.folder, found.topic, found.partition, lambda: read_topic_file(fs, folder)[1],
        drop_unreadable=drop_unreadable,
    )  # fmt: skip


def _look_again(fs: FileSystem, path: str, found: PartitionFindings) -> PartitionFindings:
    """The partition as it is now."""
    from segmentlog.inspection.finding import Tally
    from segmentlog.inspection.partition_inspection import inspect_partition
    from segmentlog.inspection.small_files import read_topic_file

    config = read_topic_file(fs, f"{path}/{found.topic}")[1]
    return inspect_partition(fs, found.folder, found.topic, found.partition, config, Tally())


def _tell_left(
    fs: FileSystem, path: str, topics: list[str], damage: list[Finding], unreadable: list[Finding], as_json: bool
) -> int:
    """Print what damage a repair does not mend, and the unreadable batches that it leaves; the exit status for them."""
    from segmentlog.cli.table_output import show_json
    from segmentlog.inspection.small_files import check_store_file
    from segmentlog.inspection.store_inspection import list_partitions

    left = list(check_store_file(fs, path))
    for name in topics:
        left += list_partitions(fs, f"{path}/{name}")[2]
    left = [finding for finding in left if finding.severity == "damage"] + damage
    for finding in left + unreadable:
        if as_json:
            show_json(finding)
        else:
            click.echo(_line(finding))
    if left:
        say(f"{len(left)} findings that a repair does not mend: see what is said there, or restore from a backup")
    if unreadable:
        say(
            f"unreadable batches that stay as they are: {len(unreadable)}. --drop-unreadable removes them; readers pass"
            " them with --skip-damaged"
        )
    if left:
        return EXIT_DAMAGE
    return EXIT_UNREADABLE if unreadable else EXIT_DONE


def _tell(found: PartitionFindings, report: RepairReport, *, as_json: bool, done: bool) -> None:
    if as_json:
        import msgspec

        from segmentlog.cli.table_output import show_json

        show_json({"done": done, "folder": found.folder, **msgspec.structs.asdict(report)})
        return
    name = f"{report.topic}/{report.partition}"
    would = "" if done else "would be "
    for number, cut in enumerate(report.cuts):
        size = cut.end_position - cut.position
        where = f", kept in {report.quarantine[number]}" if number < len(report.quarantine) else ""
        what = "" if cut.record_count is None else f"unreadable batch, {cut.record_count} records by its header: "
        click.echo(f"{name}: {size} bytes {would}cut out of {cut.path} at byte {cut.position}: {what}{cut.why}{where}")
    for lost in report.lost:
        click.echo(f"{name}: offsets [{lost.base_offset}, {lost.end_offset}) {would}recorded as lost: {lost.reason}")
    for path in report.indexes:
        click.echo(f"{name}: {path} {would}made anew")
    for path in report.caches:
        click.echo(f"{name}: {path} {would}removed: it is not true, and made anew from the log when it is needed")
    if report.state:
        click.echo(f"{name}: the state page {would}told that {report.state}")
    if report.checkpoint:
        click.echo(f"{name}: checkpoint {would}written anew: {report.checkpoint}")
    if report.recovery is not None:
        click.echo(f"{name}: recovered: {report.recovery.verdict}: {report.recovery.why}")
    elif not done and (not found.live or found.state.failed):
        click.echo(f"{name}: would then be recovered, as the next open does it anyway")
