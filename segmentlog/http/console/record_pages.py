"""The pages about records: searching, one in full, the live tail."""

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
from segmentlog.http.console.forms import number
from segmentlog.http.console.live_tail import EVERY_S, Tail, parse_position
from segmentlog.http.console.pages import Console, topic_address
from segmentlog.http.console.record_search import Found, find_record, readable_from, search
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
"""A topic with more partitions is searched one partition at a time."""
_TAILS_MAX: Final = 32
_QUIET_S: Final = 15.0
"""A tail that has nothing to say says so this often, or nobody would notice that its reader has gone."""
_PLACES: Final = ("end", "start", "offset", "time", "key")

Decode = Callable[[str, bytes], str | None]
"""A topic's name and a value to a text, by the schema that the value names; None for one that names none."""
_FILTERS: Final = {"key": "--key", "value": "--contains", "path": "--where", "header": "--header"}
"""Fields of the forms, and the options of `consume` and `tail` that do the same."""


class RecordPages:
    """Searching in a topic, one record, the live tail."""

    def __init__(self, console: Console, decode: Decode | None = None, documents: DecodeValue | None = None) -> None:
        self._console = console
        self._decode = decode
        self._documents = documents
        self._tails: Counter[Principal] = Counter()

    # ------------------------------------------------------------ searching

    def all(self, request: Request) -> Response:
        """Records of a topic, as many as fit on a page."""
        topic = self._console.topic(request, Operation.READ)
        params = request.query_params
        count = topic.partition_count
        errors: dict[str, str] = {}
        numbers = _chosen(params.get("partition", ""), count)
        at = params.get("at", "end") if params.get("at") in _PLACES else "end"
        isolation: Isolation = "read_committed" if params.get("committed") == "1" else "read_uncommitted"
        limit = number(params.get("n", ""), _LIMIT, 1, _LIMITS[-1])
        wanted = self._filter(request, errors)
        found, older = None, at == "end"
        logs = [topic.partition(one) for one in numbers]
        begins: dict[int, int] | None = None
        if params.get("go"):
            begins = parse_position(params["go"])
        if (begins is None or begins.keys() != {log.number for log in logs}) and not (errors and at == "key"):
            begins = self._begins(logs, at, params.get("where", ""), isolation, errors)
        if begins is not None and not errors:
            found = search(logs, begins, wanted, limit=limit, backwards=older, isolation=isolation)
        context = {
            "topic": topic, "partition_count": count, "partition": params.get("partition", ""), "numbers": numbers,
            "at": at, "where": params.get("where", ""), "limit": limit, "limits": _LIMITS, "errors": errors,
            "committed": isolation == "read_committed", "found": found, "older": older,
            "rows": [_row(record) for record in found.records] if found else [],
            "together_max": _TOGETHER_MAX,
            "go_on": self._go_on(request, found) if found and not found.is_complete else None,
            "command": self._console.command(
                request, *_words(topic, numbers, at, params, limit, isolation, begins if at == "key" else None)
            ),
        }  # fmt: skip
        return self._console.render(request, "records.html", 422 if errors else 200, nav="topics", **context)

    def _filter(self, request: Request, errors: dict[str, str]) -> RecordFilter:
        try:
            return RecordFilter.parse(decode=self._decoder(request), **_filled_in(request.query_params))
        except InvalidConfig as error:
            errors["header" if error.key == "header" else "path"] = error.accepted
            return RecordFilter()

    def _decoder(self, request: Request) -> DecodeValue | None:
        """Return what decodes values for a JSON path; None for a principal that may not see schemas."""
        # A search for a path and a value answers what the decoded value is, as showing it does.
        return self._documents if self._console.may_see(request, Thing.SCHEMAS) else None

    def _begins(
        self, logs: list[Partition], at: str, where: str, isolation: Isolation, errors: dict[str, str]
    ) -> dict[int, int]:
        """Where to begin in each partition; ``errors`` says why nowhere."""
        ends = {log.number: log.end_offset(isolation=isolation) for log in logs}
        if at == "end":
            return ends
        if at == "start":
            return {log.number: log.log_start_offset for log in logs}
        if not where.strip():
            errors["where"] = f"say which {at}"
            return ends
        if at == "key":
            return self._behind_key(logs, ends, where, isolation, errors)
        try:
            place = parse_start_position(where, self._console.now_ms())
        except ValueError as error:
            errors["where"] = str(error)
            return ends
        if at == "offset" and place.kind == "time":
            errors["where"] = "an offset is a whole number, or -10 for the last ten"
        if at == "time" and place.kind != "time":
            errors["where"] = "a time is 2026-07-31T12:00, -1h for an hour ago, or @1785456000000"
        if errors:
            return ends
        return {log.number: readable_from(log, resolve_position(place, log, ends[log.number])) for log in logs}

    def _behind_key(
        self, logs: list[Partition], ends: dict[int, int], key: str, isolation: Isolation, errors: dict[str, str]
    ) -> dict[int, int]:
        """The newest record with that key, and its partition from there on; the others at their ends."""
        found = search(logs, ends, RecordFilter.parse(key=key), limit=1, backwards=True, isolation=isolation)
        if found.records:
            return {**ends, found.records[0].partition: found.records[0].offset}
        if found.is_complete:
            errors["where"] = "no record has this key"
        else:
            errors["where"] = (
                f"none of the newest {found.record_count:,} records has this key, and there are more:"
                " a filter by key goes on further"
            )
        return ends

    def _go_on(self, request: Request, found: Found) -> str:
        cursor = ",".join(f"{one}:{offset}" for one, offset in sorted(found.cursors.items()))
        given = {name: value for name, value in request.query_params.items() if name != "go"}
        if given.get("at") == "key":  # found already
            given |= {"at": "start", "where": ""}
        return topic_address(request.path_params["topic"], "/records", **{**given, "go": cursor})

    # ------------------------------------------------------------ one record

    def show(self, request: Request) -> Response:
        """One record in full."""
        topic, log, offset = self._where(request)
        try:
            record, damage = find_record(log, offset), ""
        except CorruptBatch as error:
            record, damage = None, self._console.site.told(str(error))
        value = record.value if record is not None else None
        looks = formatting.look_at(value)
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
            shown = formatting.show(decoded.encode(errors="replace"), formatting.FULL_BYTES)
        elif view and value:
            shown = formatting.show_as(value, view, looks)  # type: ignore[arg-type]
        return self._console.render(
            request, "record.html", HTTPStatus.OK if record is not None else HTTPStatus.NOT_FOUND, nav="topics",
            topic=topic, log=log, offset=offset, record=record, damage=damage, views=views, view=view, shown=shown,
            key=formatting.show(record.key, formatting.FULL_BYTES) if record is not None else None,
            headers=[(name, formatting.show(data, 4096)) for name,
            data in record.headers] if record is not None else [],
            next_offset=readable_from(log, offset + 1) if offset >= 0 else log.log_start_offset,
            command=self._console.command(
                request, "consume", f"{topic.name}/{log.number}", "--from", offset, "-n", 1, "--json"
            ),
        )  # fmt: skip

    def value(self, request: Request) -> Response:
        """The bytes of a value, to be saved: never shown."""
        topic, log, offset = self._where(request)
        record = find_record(log, offset)
        if record is None or record.value is None:
            raise HttpProblem(HTTPStatus.NOT_FOUND, f"{topic.name}/{log.number} has no value at offset {offset}")
        name = f"{topic.name}-{log.number}-{offset}.bin"
        return Response(
            record.value, media_type="application/octet-stream",
            headers={"content-disposition": f'attachment; filename="{name}"'},
        )  # fmt: skip

    def _where(self, request: Request) -> tuple[Topic, Partition, int]:
        topic = self._console.topic(request, Operation.READ)
        log = topic.partition(number(request.path_params["partition"], -1, -1))
        return topic, log, number(request.path_params["offset"], -1, -1)

    # ------------------------------------------------------------ the live tail

    def tail(self, request: Request) -> Response:
        """The page; its script asks for the events."""
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

    async def events(self, request: Request) -> Response:
        """Records as they come, as server-sent events. An event's id says where to go on."""
        try:
            tail = await run_in_threadpool(self._open_tail, request)
        except (SegmentlogError, OSError) as error:
            problem = self._console.site.problem_of(error)
            return PlainTextResponse(f"{problem.message}\n", problem.status, headers=problem.headers)
        return StreamingResponse(
            self._events(request, tail), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
        )

    def _open_tail(self, request: Request) -> Tail:
        topic = self._console.topic(request, Operation.READ)
        principal = self._console.site.principal(request)
        share = self._console.site.share(principal, _TAILS_MAX)
        if self._tails.total() >= _TAILS_MAX or self._tails[principal] >= share:
            text = f"{share} pages follow records already: close one"
            raise HttpProblem(HTTPStatus.SERVICE_UNAVAILABLE, text, headers={"retry-after": "5"})
        params = request.query_params
        errors: dict[str, str] = {}
        wanted = self._filter(request, errors)
        if errors:
            raise InvalidConfig(*next(iter(errors.items())), "see the form")
        numbers = _chosen(params.get("partition", ""), topic.partition_count)
        position = request.headers.get("last-event-id") or params.get("after", "")
        return Tail([topic.partition(one) for one in numbers], wanted, position)

    async def _events(self, request: Request, tail: Tail) -> AsyncIterator[str]:
        principal = self._console.site.principal(request)
        self._tails[principal] += 1
        quiet_s = 0.0
        try:
            yield f"retry: 2000\nid: {tail.position}\nevent: begin\ndata: {{}}\n\n"
            while not self._console.is_closing:
                self._console.check_topic(request, Operation.READ)  # rights are taken away while somebody looks on
                tail.decode_by(self._decoder(request))
                look = await run_in_threadpool(tail.look)
                if look is not None:
                    yield f"id: {look.position}\ndata: {look.text()}\n\n"
                    quiet_s = 0.0
                elif quiet_s >= _QUIET_S:
                    yield ": nothing new\n\n"
                    quiet_s = 0.0
                await asyncio.sleep(EVERY_S)
                quiet_s += EVERY_S
        except (SegmentlogError, OSError) as error:  # deleted meanwhile, or the store is closed
            yield f"event: end\ndata: {json.dumps({'message': self._console.site.problem_of(error).message})}\n\n"
        finally:
            self._tails[principal] -= 1
            self._tails += Counter()  # without those who have none


def _chosen(text: str, count: int) -> list[int]:
    """The partitions that are meant. Raises `UnknownTopic`."""
    if not text.strip():
        return list(range(count)) if count <= _TOGETHER_MAX else [0]
    chosen = number(text, -1, -1)
    if not 0 <= chosen < count:
        raise UnknownTopic(text, f"there is no such partition, only 0 to {count - 1}")
    return [chosen]


def _row(record: Record) -> dict[str, Any]:
    return {
        "record": record,
        "key": formatting.show(record.key, 80, one_line=True),
        "value": formatting.show(record.value, formatting.LIST_CHARS, one_line=True),
        "headers": [name for name, _ in record.headers],
    }


def _filled_in(params: Any) -> dict[str, str]:
    """The fields that a form filters by."""
    found = {name: params.get(name, "") for name in _FILTERS}
    return {name: text for name, text in found.items() if (text if name in ("key", "value") else text.strip())}


def _filter_words(params: Any) -> list[str]:
    """The options of the command line for what a form filters by."""
    return [word for name, text in _filled_in(params).items() for word in (_FILTERS[name], text)]


def _words(
    topic: Topic, numbers: list[int], at: str, params: Any, limit: int, isolation: Isolation,
    begins: dict[int, int] | None,
) -> list[object]:  # fmt: skip
    """The command that prints what a page of records shows; ``begins``: of a search by key, where that was found."""
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
