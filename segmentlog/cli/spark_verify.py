"""``segmentlog spark verify``: what ``segmentlog verify TOPIC`` does, in as many tasks as there are cores."""

from __future__ import annotations

import click

from segmentlog.cli.option_types import complete_topic, json_option
from segmentlog.cli.spark_command import spark_session
from segmentlog.cli.verify_repair import check_topics, progress_of_bytes, store_files, tell_findings, tell_verdict


@click.command()
@click.argument("topic", shell_complete=complete_topic)
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Leave out notes: what is harmless.")
@click.option("--strict", is_flag=True, help="Exit with 3 for warnings, too: any wrong byte, even in a cache.")
@click.pass_context
def verify(ctx: click.Context, topic: str, as_json: bool, quiet: bool, strict: bool) -> int:
    """Check every checksum, index and invariant of TOPIC, in parallel.

    Says what 'segmentlog verify TOPIC' says, and exits as it does. Spark takes seconds to
    start: worth it for many gigabytes, and many cores.
    """
    from segmentlog.inspection.store_inspection import size_of

    with store_files(ctx, topic) as (fs, path):
        check_topics(fs, path, topic)
        size_bytes = size_of(fs, path, [topic])
    with spark_session(ctx) as spark:
        from segmentlog.spark.pipelines.topic_verify import verify as verify_topic

        with progress_of_bytes(size_bytes, "verifying") as tally:
            report = verify_topic(
                spark, ctx.obj, topic, on_progress=lambda done, _: tally.add_bytes(done - tally.size_bytes)
            )
    counts = tell_findings(report.findings, as_json=as_json, quiet=quiet)
    looked_at = (report.partitions, report.segments, report.batches, report.records, report.size_bytes)
    return tell_verdict(counts, looked_at, report.seconds, strict=strict)
