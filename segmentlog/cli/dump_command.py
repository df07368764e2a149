"""``segmentlog dump``: what lies in one file of a partition, whole or not."""

from __future__ import annotations

import click

from segmentlog.cli.common import EXIT_DAMAGE, EXIT_DONE, EXIT_UNREADABLE, say
from segmentlog.cli.option_types import SIZE, json_option
from segmentlog.cli.table_output import show_json


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--records", is_flag=True, help="The records of each batch, too.")
@click.option("--from", "from_position", type=SIZE, default=0, metavar="POSITION",
              help="Begin at the first batch at or after this byte.")  # fmt: skip
@json_option
@click.pass_context
def dump(ctx: click.Context, file: str, records: bool, from_position: int, as_json: bool) -> int:
    """Print the batches of one segment file, even of a broken one: damage is told and stepped over.

    By its name FILE may also be an index (.index, .timeindex), a list of aborted transactions
    (.txnindex), what was known of producers (.snapshot), where a segment lies in the object store
    (.remote), a checkpoint or a state page; anything else, as what a repair put into quarantine, is
    read as a segment. Exits with 3 when something is damaged, else with 4 when the records of a batch do
    not decode though its checksum is right.
    """
    from segmentlog.inspection.file_dump import describe_file

    data = _read(file)
    if from_position > len(data):
        raise click.BadParameter(f"the file has {len(data)} bytes", param_hint="--from")
    types = set()
    for document, text in describe_file(file, data, from_position, records, say):
        types.add(document["type"])
        if as_json:
            show_json(document)
        else:
            click.echo(text)
    if "damage" in types:
        return EXIT_DAMAGE
    return EXIT_UNREADABLE if "unreadable" in types else EXIT_DONE


def _read(file: str) -> bytes:
    """All of a file; of a segment that lies in the object store alone what lies there."""
    from segmentlog.format.file_names import LOG_SUFFIX
    from segmentlog.inspection.segment_inspection import read_segment
    from segmentlog.storage.fs import FileSystem
    from segmentlog.storage.segment_stub import stub_path

    fs = FileSystem()
    if file.endswith(LOG_SUFFIX) and fs.exists(stub_path(file)):
        from segmentlog.objects.tier.remote_reader import remote_segments_readable

        with remote_segments_readable(fs):
            return bytes(read_segment(fs, file)[1])
    with open(file, "rb") as opened:
        return opened.read()
