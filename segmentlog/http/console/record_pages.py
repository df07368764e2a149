"""Pages about records: search, one record, the live tail."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from segmentlog.consuming.record_filter import DecodeValue, RecordFilter
from segmentlog.consuming.start_position import parse_start_position, resolve_position
from segmentlog.errors import CorruptBatch, InvalidConfig, SegmentlogError, UnknownTopic
from segmentlog.http.console import formatting
from segmentlog.http.console.forms import parse_number
from segmentlog.http.console.live_tail import POLL_INTERVAL_S, LiveTail, parse_position
from segmentlog.http.console.pages import Console, topic_address
from segmentlog.http.console.record_search import SearchResult, find_record, readable_from, search
from segmentlog.http.error_responses import HttpProblem
from segmentlog.security.principals import Operation
from segmentlog.security.viewer import Thing

if TYPE_CHECKING:
    from starlette.requests import Request

    from segmentlog.log.partition import Isolation, Partition
    from segmentlog.records import Record
    from segmentlog.security.principals import Principal
    from segmentlog.topics.topic_registry import Topic

_LIMITS: Final = (20, 50, 100, 200)
_LIMIT: Final = 50
_TOGETHER_MAX: Final = 64
"""Topics with more partitions are searched one partition at a time."""
_TAILS_MAX: Final = 32
_QUIET_S: Final = 15.0
"""Seconds between comments of an idle live tail. They let the server notice a closed page."""
_PLACES: Final = ("end", "start", "offset", "time", "key")

Decode = Callable[[str, bytes], str | None]
"""Function from a topic's name and a value to text, by the schema that the value names; None without a schema."""
_FILTERS: Final = {"key": "--key", "value": "--contains", "path": "--where", "header": "--header"}
"""Form fields and the equivalent options of `consume` and `tail`."""


class RecordPages:
    """Handlers of the pages about records."""

    def __init__(self, console: Console, decode: Decode | None = None, documents: DecodeValue | None = None) -> None:
        self._console = console
        self._decode = decode
        self._documents = documents
        self._tails: Counter[Principal] = Counter()

    # ------------------------------------------------------------ search

    def search_records(self, request: Request) -> Response:
        """Search records of a topic, and show one page of results."""
        topic = self._console.topic(request, Operation.READ)
        params = request.query_params
        count = topic.partition_count
        errors: dict[str, str] = {}
        numbers = _chosen(params.get("partition", ""), count)
        at = params.get("at", "end") if params.get("at") in _PLACES else "end"
        isolation: Isolation = "read_committed" if params.get("committed") == "1" else "read_uncommitted"
        limit = parse_number(params.get("n", ""), _LIMIT, 1, _LIMITS[-1])
        record_filter = self._filter(request, errors)
        found, older = None, at == "end"
        logs = [topic.partition(one) for one in numbers]
        begins: dict[int, int] | None = None
        if params.get("go"):
            begins = parse_position(params["go"])
        if (begins is None or begins.keys() != {log.number for log in logs}) and not (errors and at == "key"):
            begins = self._begins(logs, at, params.get("where", ""), isolation, errors)
        if begins is not None and not errors:
            found = search(logs, begins, record_filter, limit=limit, backwards=older, isolation=isolation)
        values = {
            "topic": topic, "partition_count": count, "partition": params.get("partition", ""), "numbers": numbers,
            "at": at, "where": params.get("where", ""), "limit": limit, "limits": _LIMITS, "errors": errors,
            "committed": isolation == "read_committed", "found": found, "older": older,
            "rows": [_row(record) for record in found.records] if found else [],
            "together_max": _TOGETHER_MAX,
            "go_on": self._go_on(request, found) if found and not found.is_complete else None,
            "command": self._console.command(
                request, *_command_words(topic, numbers, at, params, limit, isolation, begins if at == "key" else None)
            ),
        }  # fmt: skip
        return self._console.render(request, "records.html", 422 if errors else 200, nav="topics", **values)

    def _filter(self, request: Request, errors: dict[str, str]) -> RecordFilter:
        try:
            return RecordFilter.parse(decode=self._decoder(request), **_filled_in(request.query_params))
        except InvalidConfig as error:
            errors["header" if error.key == "header" else "path"] = error.accepted
            return RecordFilter()

    def _decoder(self, request: Request) -> DecodeValue | None:
        """Return the function that decodes values for JSON paths; None if the principal may not see schemas."""
        # A search by JSON path reveals decoded values, as a page that shows them would.
        return self._documents if self._console.may_see(request, Thing.SCHEMAS) else None

    def _begins(
        self, logs: list[Partition], at: str, start_text: str, isolation: Isolation, errors: dict[str, str]
    ) -> dict[int, int]:
        """Return the offset to start at in each partition. Adds a problem with the form to ``errors``."""
        ends = {log.number: log.end_offset(isolation=isolation) for log in logs}
        if at == "end":
            return ends
        if at == "start":
            return {log.number: log.log_start_offset for log in logs}
        if not start_text.strip():
            errors["where"] = f"enter {'an offset' if at == 'offset' else f'a {at}'}"
            return ends
        if at == "key":
            return self._behind_key(logs, ends, start_text, isolation, errors)
        try:
            place = parse_start_position(start_text, self._console.now_ms())
        except ValueError as error:
            errors["where"] = str(error)
            return ends
        if at == "offset" and place.kind == "time":
            errors["where"] = "an offset is a whole number; -10 means the last ten"
        if at == "time" and place.kind != "time":
            errors["where"] = "a time is 2026-07-31T12:00, -1h (one hour ago) or @1785456000000 (ms since 1970)"
        if errors:
            return ends
        return {log.number: readable_from(log, resolve_position(place, log, ends[log.number])) for log in logs}

    def _behind_key(
        self, logs: list[Partition], ends: dict[int, int], key: str, isolation: Isolation, errors: dict[str, str]
    ) -> dict[int, int]:
        """Return the offset to start at in each partition.

        The partition of the newest record with this key starts at that record, all other partitions start at their end.
        """
        found = search(logs, ends, RecordFilter.parse(key=key), limit=1, backwards=True, isolation=isolation)
        if found.records:
            return {**ends, found.records[0].partition: found.records[0].offset}
        if found.is_complete:
            errors["where"] = "no record has this key"
        else:
            errors["where"] = (
                f"none of the newest {found.record_count:,} records has this key; to search older records,"
                " use the filter Key"
            )
        return ends

    def _go_on(self, request: Request, found: SearchResult) -> str:
        cursor = ",".join(f"{one}:{offset}" for one, offset in sorted(found.cursors.items()))
        given = {name: value for name, value in request.query_params.items() if name != "go"}
        if given.get("at") == "key":  # the key was found
            given |= {"at": "start", "where": ""}
        return topic_address(request.path_params["topic"], "/records", **{**given, "go": cursor})

    # ------------------------------------------------------------ one record

    def show_record(self, request: Request) -> Response:
        """Show one record in full."""
        topic, log, offset = self._resolve_record(request)
        try:
            record, damage = find_record(log, offset), ""
        except CorruptBatch as error:
            record, damage = None, self._console.context.redact_paths(str(error))
        value = record.value if record is not None else None
        looks = formatting.find_views(value)
        views: list[str] = list(looks.views)
        decoded = None
        if value and value[:1] == b"\0" and self._decode and self._console.may_see(request, Thing.SCHEMAS):
            decoded = self._decode(topic.name, value)
            if decoded is not None:
                views.insert(0, "schema")
        view = request.query_params.get("as", "")
        view = view if view in views else (views[0] if views else "")
        shown = None
        if view == "schema" and decoded is not None:
            shown = formatting.render_bytes(decoded.encode(errors="replace"), formatting.FULL_BYTES)
        elif view and value:
            shown = formatting.render_view(value, view, looks)  # type: ignore[arg-type]
        return self._console.render(
            request, "record.html", HTTPStatus.OK if record is not None else HTTPStatus.NOT_FOUND, nav="topics",
            topic=topic, log=log, offset=offset, record=record, damage=damage, views=views, view=view, shown=shown,
            key=formatting.render_bytes(record.key, formatting.FULL_BYTES) if record is not None else None,
            headers=[(name, formatting.render_bytes(data, 4096)) for name,
            data in record.headers] if record is not None else [],
            next_offset=readable_from(log, offset + 1) if offset >= 0 else log.log_start_offset,
            command=self._console.command(
                request, "consume", f"{topic.name}/{log.number}", "--from", offset, "-n", 1, "--json"
            ),
        )  # fmt: skip

    def download_value(self, request: Request) -> Response:
        """Return the bytes of a value as a download."""
        topic, log, offset = self._resolve_record(request)
        record = find_record(log, offset)
        if record is None or record.value is None:
            raise HttpProblem(
                HTTPStatus.NOT_FOUND, f"{topic.name}/{log.number} has no record with a value at offset {offset}"
            )
        name = f"{topic.name}-{log.number}-{offset}.bin"
        return Response(
            record.value, media_type="application/octet-stream",
            headers={"content-disposition": f'attachment; filename="{name}"'},
        )  # fmt: skip

    def _resolve_record(self, request: Request) -> tuple[Topic, Partition, int]:
        topic = self._console.topic(request, Operation.READ)
        log = topic.partition(parse_number(request.path_params["partition"], -1, -1))
        return topic, log, parse_number(request.path_params["offset"], -1, -1)

    # ------------------------------------------------------------ the live tail

    def show_tail(self, request: Request) -> Response:
        """Show the live tail; the page's script requests the events."""
        topic = self._console.topic(request, Operation.READ)
        params = request.query_params
        errors: dict[str, str] = {}
        self._filter(request, errors)
        count = topic.partition_count
        numbers = _chosen(params.get("partition", ""), count)
        given = {name: params.get(name, "") for name in ("partition", "key", "value", "path", "header")}
        where = topic.name if len(numbers) == count else f"{topic.name}/{numbers[0]}"
        return self._console.render(
            request, "tail.html", 422 if errors else 200, nav="topics", topic=topic, partition_count=count,
            numbers=numbers, given=given, errors=errors, together_max=_TOGETHER_MAX,
            events=topic_address(topic.name, "/tail/events", **given),
            command=self._console.command(request, "tail", "-f", where, *_filter_words(params)),
        )  # fmt: skip

    async def stream_events(self, request: Request) -> Response:
        """Stream new records as server-sent events. The id of an event is the position to resume at."""
        try:
            tail = await run_in_threadpool(self._open_tail, request)
        except (SegmentlogError, OSError) as error:
            problem = self._console.context.problem_of(error)
            return PlainTextResponse(f"{problem.message}\n", problem.status, headers=problem.headers)
        return StreamingResponse(
            self._events(request, tail), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
        )

    def _open_tail(self, request: Request) -> LiveTail:
        topic = self._console.topic(request, Operation.READ)
        principal = self._console.context.principal(request)
        share = self._console.context.limit_for(principal, _TAILS_MAX)
        if self._tails.total() >= _TAILS_MAX or self._tails[principal] >= share:
            text = f"{share} live tails are open, the maximum: close one of them"
            raise HttpProblem(HTTPStatus.SERVICE_UNAVAILABLE, text, headers={"retry-after": "5"})
        params = request.query_params
        errors: dict[str, str] = {}
        record_filter = self._filter(request, errors)
        if errors:
            raise InvalidConfig(*next(iter(errors.items())), "see the form")
        numbers = _chosen(params.get("partition", ""), topic.partition_count)
        position = request.headers.get("last-event-id") or params.get("after", "")
        return LiveTail([topic.partition(one) for one in numbers], record_filter, position)

    async def _events(self, request: Request, tail: LiveTail) -> AsyncIterator[str]:
        principal = self._console.context.principal(request)
        self._tails[principal] += 1
        quiet_s = 0.0
        try:
            yield f"retry: 2000\nid: {tail.position}\nevent: begin\ndata: {{}}\n\n"
            while not self._console.is_closing:
                self._console.check_topic(request, Operation.READ)  # rights may be revoked while a page is open
                tail.set_decoder(self._decoder(request))
                update = await run_in_threadpool(tail.poll)
                if update is not None:
                    yield f"id: {update.position}\ndata: {update.text()}\n\n"
                    quiet_s = 0.0
                elif quiet_s >= _QUIET_S:
                    yield ": no new records\n\n"
                    quiet_s = 0.0
                await asyncio.sleep(POLL_INTERVAL_S)
                quiet_s += POLL_INTERVAL_S
        except (SegmentlogError, OSError) as error:  # the topic was deleted, or the store closed
            yield f"event: end\ndata: {json.dumps({'message': self._console.context.problem_of(error).message})}\n\n"
        finally:
            self._tails[principal] -= 1
            self._tails += Counter()  # drop zero counts


def _chosen(text: str, count: int) -> list[int]:
    """Return the partitions that the form names. Raises `UnknownTopic`."""
    if not text.strip():
        return list(range(count)) if count <= _TOGETHER_MAX else [0]
    chosen = parse_number(text, -1, -1)
    if not 0 <= chosen < count:
        raise UnknownTopic(text, f"the topic has the partitions 0 to {count - 1}")
    return [chosen]


def _row(record: Record) -> dict[str, Any]:
    return {
        "record": record,
        "key": formatting.render_bytes(record.key, 80, one_line=True),
        "value": formatting.render_bytes(record.value, formatting.LIST_CHARS, one_line=True),
        "headers": [name for name, _ in record.headers],
    }


def _filled_in(params: Any) -> dict[str, str]:
    """Return the filter fields of a form that are filled in."""
    found = {name: params.get(name, "") for name in _FILTERS}
    return {name: text for name, text in found.items() if (text if name in ("key", "value") else text.strip())}


def _filter_words(params: Any) -> list[str]:
    """Return the command-line options equivalent to the filters of a form."""
    return [word for name, text in _filled_in(params).items() for word in (_FILTERS[name], text)]


def _command_words(
    topic: Topic, numbers: list[int], at: str, params: Any, limit: int, isolation: Isolation,
    begins: dict[int, int] | None,
) -> list[object]:  # fmt: skip
    """Return the words of the command that prints the records of a page.

    ``at`` is the place that the form selects: "end", "start", "key", or another one, which its field ``where`` names.
    ``begins`` is the result of a search by key, if there was one.
    """
    filters = _filter_words(params)
    name = topic.name if len(numbers) == topic.partition_count and len(numbers) > 1 else f"{topic.name}/{numbers[0]}"
    where = params.get("where", "").strip()
    committed = ["--isolation", isolation] if isolation == "read_committed" else []
    if at == "end" and filters:
        return ["tail", name, "-n", limit, *filters, *committed]
    place: object = {"end": f"-{limit}", "start": "earliest", "key": "earliest"}.get(at) or where or "earliest"
    if begins is not None:
        ends = {number: topic.partition(number).end_offset(isolation=isolation) for number in numbers}
        found = [number for number in numbers if begins.get(number, ends[number]) < ends[number]]
        if found:
            name, place = f"{topic.name}/{found[0]}", begins[found[0]]
    return ["consume", name, "--from", place, *([] if at == "end" else ["-n", limit]), *filters, *committed]
