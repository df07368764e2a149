"""What is asked of what is ours, and answered."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from segmentlog.http.rest.endpoint_table import Natural, PartitionNumber
from segmentlog.http.rest.record_json import RecordDocument, ValuesAs

_ValuesAs = Annotated[
    ValuesAs,
    Meta(
        description="How values come: `text` (base64 where they are no UTF-8), `json` (as part of the document where"
        " they are JSON) or `base64`."
    ),
]
_Isolation = Annotated[
    Literal["read_uncommitted", "read_committed"],
    Meta(description="With `read_committed` no record of an open or aborted transaction is shown."),
]
_Durable = Annotated[bool, Meta(description="Show only what no crash can take back.")]


class ReadQuery(Struct):
    offset: Annotated[
        Natural | Literal["earliest", "latest"], Meta(description="Where to begin, by default at the first record.")
    ] = "earliest"
    max: Annotated[int, Meta(ge=1, le=2**63 - 1, description="Records at the most.")] | None = None
    values: _ValuesAs = "text"
    form: Annotated[
        Literal["records", "values"], Meta(description="Of lines: whole records, or the values alone, as they are.")
    ] = "records"
    isolation: _Isolation = "read_uncommitted"
    durable_only: _Durable = False


class RecordPage(Struct):
    """Records, the offset to go on at, and where the partition begins and ends."""

    records: list[RecordDocument]
    next_offset: int
    log_start_offset: int
    end_offset: int


class StreamQuery(Struct):
    start: Annotated[Literal["earliest", "latest"], Meta(description="Where to begin without a `Last-Event-ID`.")] = (
        field(name="from", default="latest")
    )
    last_event_id: Annotated[
        str | None, Meta(description="The header of that name, for those that cannot send it.")
    ] = None
    gaps: Annotated[
        Literal["error", "skip"],
        Meta(
            description="What becomes of a reader whose place is gone, because a crash or retention took it: an error,"
            " or an event `gap` that names the offsets, and the stream goes on behind them."
        ),
    ] = "error"
    values: _ValuesAs = "text"
    isolation: _Isolation = "read_uncommitted"
    durable_only: _Durable = False


class AppendQuery(Struct):
    partition: Annotated[
        PartitionNumber | None,
        Meta(description="Where all lines go; by default each chunk of them goes to the partition whose turn it is."),
    ] = None
    ack: Annotated[
        Literal["written", "durable", "shipped"] | None,
        Meta(description="What records survive before the answer; by default as the topic's fsync policy says."),
    ] = None
    form: Annotated[
        Literal["values", "records"],
        Meta(description="What a line is: a value as it is, or a record as `GET` and `segmentlog export` have it."),
    ] = "values"
    producer: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=200,
                description="A named producer: lines that it has appended before, by number, are not appended again.",
            ),
        ]
        | None
    ) = None
    sequence: Annotated[
        int,
        Meta(ge=0, le=2**62, description="The number of the first line among all that this producer sends there."),
    ] = 0


class Range(Struct):
    """Records that lie one behind the other."""

    partition: int
    base_offset: int
    records: int


class Appended(Struct):
    """How many records were appended, and where."""

    records: int
    ranges: list[Range]
    skipped: int | UnsetType = UNSET
    next_sequence: int | UnsetType = UNSET


class Broken(Struct):
    """Why not all of the lines were appended, and which were."""

    error_code: int
    message: str
    appended: Appended
    next_line: int
    """The first line of the body, counted from 1, that is not known to be appended."""
