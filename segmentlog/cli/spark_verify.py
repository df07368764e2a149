"""``segmentlog spark verify``: verify a topic in parallel on Spark."""

from __future__ import annotations

import click

from segmentlog.cli.option_types import complete_topic, json_option
from segmentlog.cli.spark_command import spark_session
from segmentlog.cli.verify_repair import find_topics, open_files, print_findings, print_verdict, progress_of_bytes


@click.command()
@click.argument("topic", shell_complete=complete_topic)
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Do not print notes, which are harmless.")
@click.option("--strict", is_flag=True, help="Exit with 3 for warnings, too: for any wrong byte, even in a cache.")
@click.pass_context
def verify(ctx: click.Context, topic: str, as_json: bool, quiet: bool, strict: bool) -> int:
    """Check every checksum, index and invariant of TOPIC in parallel.

    Prints the same findings as 'segmentlog verify TOPIC', with the same exit status. Spark takes seconds to start, so
    this is faster only for many gigabytes and many cores.
    """
    from segmentlog.inspection.store_inspection import find_segments_size

    with open_files(ctx, topic) as (fs, path):
        find_topics(fs, path, topic)
        size_bytes = find_segments_size(fs, path, [topic])
    with spark_session(ctx) as spark:
        from segmentlog.spark.pipelines.topic_verify import verify as verify_topic

        with progress_of_bytes(size_bytes, "verifying") as tally:
            report = verify_topic(
                spark, ctx.obj, topic, on_progress=lambda done, _: tally.add_bytes(done - tally.size_bytes)
            )
    counts = print_findings(report.findings, as_json=as_json, quiet=quiet)
    checked = (report.partitions, report.segments, report.batches, report.records, report.size_bytes)
    return print_verdict(counts, checked, report.seconds, strict=strict)
