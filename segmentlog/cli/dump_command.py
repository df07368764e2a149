"""``segmentlog dump``: print the contents of one file of a partition, damaged or not."""

from __future__ import annotations

import click

from segmentlog.cli.common import EXIT_DAMAGE, EXIT_DONE, EXIT_UNREADABLE, say
from segmentlog.cli.option_types import SIZE, json_option
from segmentlog.cli.table_output import show_json


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--records", is_flag=True, help="Print the records of each batch, too.")
@click.option("--from", "from_position", type=SIZE, default=0, metavar="POSITION",
              help="Start at the first batch at or after this byte.")  # fmt: skip
@json_option
@click.pass_context
def dump(ctx: click.Context, file: str, records: bool, from_position: int, as_json: bool) -> int:
    """Print the batches of one segment file. Reports damage and continues after it.

    The name of FILE determines its format: an index (.index, .timeindex), a list of aborted transactions (.txnindex), a
    snapshot of producers (.snapshot), the location of a segment in the object store (.remote), a checkpoint or a state
    page. Any other file, for example one in quarantine, is read as a segment.

    Exits with 3 if something is damaged. Exits with 4 if the only problem is a batch whose checksum is right but whose
    records do not decode.
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
    """Return the whole file; for a segment that was evicted to the object store, its local part."""
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
