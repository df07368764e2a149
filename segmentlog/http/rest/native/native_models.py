"""Requests and responses of segmentlog's own REST endpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from segmentlog.http.rest.endpoint_table import Natural, PartitionNumber
from segmentlog.http.rest.record_json import RecordDocument, ValueEncoding

_ValuesAs = Annotated[
    ValueEncoding,
    Meta(
        description="Encoding of values: `text` (base64 if not UTF-8), `json` (embedded if they are JSON) or `base64`."
    ),
]
_Isolation = Annotated[
    Literal["read_uncommitted", "read_committed"],
    Meta(description="`read_committed` omits records of open and aborted transactions."),
]
_Durable = Annotated[bool, Meta(description="Return only records that survive any crash.")]


class ReadQuery(Struct):
    offset: Annotated[
        Natural | Literal["earliest", "latest"], Meta(description="Offset to start at; default: the first record.")
    ] = "earliest"
    max: Annotated[int, Meta(ge=1, le=2**63 - 1, description="Maximum number of records.")] | None = None
    values: _ValuesAs = "text"
    form: Annotated[
        Literal["records", "values"], Meta(description="Content of a line: the whole record, or the unchanged value.")
    ] = "records"
    isolation: _Isolation = "read_uncommitted"
    durable_only: _Durable = False


class RecordPage(Struct):
    """Records, the offset to continue at, and the start and end of the partition."""

    records: list[RecordDocument]
    next_offset: int
    log_start_offset: int
    end_offset: int


class StreamQuery(Struct):
    start: Annotated[Literal["earliest", "latest"], Meta(description="Where to start without a `Last-Event-ID`.")] = (
        field(name="from", default="latest")
    )
    last_event_id: Annotated[
        str | None, Meta(description="Replaces the header `Last-Event-ID` for clients that cannot send it.")
    ] = None
    gaps: Annotated[
        Literal["error", "skip"],
        Meta(
            description="Action if the next offset was lost in a crash or deleted by retention: `error` returns an"
            " error, `skip` sends an event `gap` with the offsets and continues after them."
        ),
    ] = "error"
    values: _ValuesAs = "text"
    isolation: _Isolation = "read_uncommitted"
    durable_only: _Durable = False


class AppendQuery(Struct):
    partition: Annotated[
        PartitionNumber | None,
        Meta(description="Partition of all lines; default: chunks are distributed round-robin."),
    ] = None
    ack: Annotated[
        Literal["written", "durable", "shipped"] | None,
        Meta(
            description="When to respond: after the write, the fsync, or the upload. Default: the topic's fsync policy."
        ),
    ] = None
    form: Annotated[
        Literal["values", "records"],
        Meta(description="Content of a line: a value, or a record in the format of `GET` and `segmentlog export`."),
    ] = "values"
    producer: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=200,
                description="Name of a producer: lines that it has already appended, by number, are skipped.",
            ),
        ]
        | None
    ) = None
    sequence: Annotated[
        int,
        Meta(
            ge=0,
            le=2**62,
            description="Number of the first line, counting all lines that this producer sends to the partition.",
        ),
    ] = 0


class AppendedRange(Struct):
    """Consecutive records of one partition."""

    partition: int
    base_offset: int
    records: int


class AppendResult(Struct):
    """Number of appended records, and their ranges."""

    records: int
    ranges: list[AppendedRange]
    skipped: int | UnsetType = UNSET
    next_sequence: int | UnsetType = UNSET


class PartialAppend(Struct):
    """The error that ended an append, and what was appended before it."""

    error_code: int
    message: str
    appended: AppendResult
    next_line: int
    """The first line of the body, counted from 1, that is not known to be appended."""
