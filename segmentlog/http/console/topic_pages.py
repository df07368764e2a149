"""Pages about topics and partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from segmentlog.errors import InvalidConfig, SegmentlogError, UnknownTopic
from segmentlog.http.console.charts import SegmentBlock, Sparkline, segment_state, segment_strip, sparkline
from segmentlog.http.console.forms import Form, first_value, parse_number
from segmentlog.http.console.pages import Console, Paging, address, redirect_after_post
from segmentlog.http.console.topic_overview import TopicOverview
from segmentlog.http.error_responses import client_message
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.security.viewer import Thing
from segmentlog.storage.state_page import PRODUCERS_WORD

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from segmentlog.config import TopicConfig
    from segmentlog.log.partition import Partition
    from segmentlog.topics.topic_registry import Topic

_TOPICS: Final = 100
_PARTITIONS: Final = 25
_SEGMENTS: Final = 50
_STRIP_SEGMENTS: Final = 200
"""Partitions with more segments show their strip on their own page only: it reads every segment's size."""
_PRODUCERS: Final = 100

_SORTS: Final[dict[str, Callable[[TopicOverview], Any]]] = {
    "name": lambda topic: topic.name,
    "partitions": lambda topic: topic.partition_count,
    "records": lambda topic: topic.record_count,
    "size": lambda topic: topic.size_bytes,
    "rate": lambda topic: topic.rate or 0.0,
    "risk": lambda topic: (topic.unsynced_count, topic.unsynced_s),
    "damage": lambda topic: topic.severity,
}


class TopicPages:
    """Handlers of the pages about topics and partitions."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._store = console.store

    # ------------------------------------------------------------ list

    def list_topics(self, request: Request) -> Response:
        """List every topic that the principal may see."""
        params = request.query_params
        console = self._console
        overview = console.overview()
        part = params.get("q", "").strip().lower()
        with_internal = params.get("internal") == "1"
        seen = [
            topic
            for topic in overview.topics.values()
            if (with_internal or not topic.is_internal) and self._console.may_see_topic(request, topic.name)
        ]
        found = [topic for topic in seen if part in topic.name.lower()] if part else seen
        sort = params.get("sort", "name") if params.get("sort") in _SORTS else "name"
        descends = params.get("dir", "asc" if sort == "name" else "desc") == "desc"
        found.sort(key=lambda topic: topic.name)
        found.sort(key=_SORTS[sort], reverse=descends)
        paging = Paging(request, len(found), _TOPICS)
        return self._console.render(
            request, "topics.html", nav="topics", overview=overview, seen=seen, found=found, paging=paging,
            totals=_totals(found),
            topics=[(topic, console.may_see(request, Thing.TOPIC_CONFIG, topic.name), self._sparkline(topic))
                    for topic in found[paging.begin : paging.end]], sort=sort, descends=descends, q=params.get("q", ""),
            with_internal=with_internal, age_s=max((self._console.now_ms() - overview.at_ms) / 1000, 0.0),
            are_rates_due=overview.rate_window_s == 0.0,
            sort_address=self._sort_address(request, sort, descends=descends),
        )  # fmt: skip

    def _sparkline(self, topic: TopicOverview) -> Sparkline | None:
        return sparkline(self._console.overviews.rates(topic.id))

    def _sort_address(self, request: Request, sort: str, *, descends: bool) -> Callable[[str], str]:
        params = request.query_params

        def to(column: str) -> str:
            other = ("asc" if descends else "desc") if column == sort else ("asc" if column == "name" else "desc")
            return address("/", q=params.get("q"), internal=params.get("internal"), sort=column, dir=other)

        return to

    # ------------------------------------------------------------ one topic

    def show_topic(self, request: Request) -> Response:
        """Show one topic."""
        console = self._console
        topic = console.topic(request)
        name = topic.name
        overview = console.overview()
        # Refresh the overview if the topic was created after the last refresh.
        if name not in overview.topics or overview.topics[name].id != topic.id:
            console.overviews.invalidate()
            overview = console.overview()
        seen = overview.topics.get(name)
        if seen is None:
            raise UnknownTopic(name)
        paging = Paging(request, seen.partition_count, _PARTITIONS)
        partitions = [
            self._row(topic, at, overview.partitions.get((name, at))) for at in range(paging.begin, paging.end)
        ]
        sees_config = console.may_see(request, Thing.TOPIC_CONFIG, name)
        return console.render(
            request, "topic.html", nav="topics", topic=seen, line=self._sparkline(seen), partitions=partitions,
            paging=paging, overview=overview,
            config=topic.config.describe() if sees_config else None,
            may_read=console.may_see(request, Thing.RECORDS, name),
            may_alter=console.may_write(request, Operation.ALTER_CONFIGS, ResourceType.TOPIC, name),
            may_delete=console.may_write(request, Operation.DELETE, ResourceType.TOPIC, name),
        )  # fmt: skip

    def _row(self, topic: Topic, number: int, state: Any) -> dict[str, Any]:
        row: dict[str, Any] = {"number": number, "state": state, "blocks": None, "error": ""}
        if state is None or state.segment_count <= _STRIP_SEGMENTS:
            try:
                row["blocks"] = _segment_blocks(topic.partition(number))
            except (SegmentlogError, OSError) as error:
                row["error"] = self._console.context.problem_of(error).message
        return row

    def show_partition(self, request: Request) -> Response:
        """Show one partition: segments, epochs, lost ranges, retention, compaction and producers."""
        console = self._console
        topic = console.topic(request)
        log = topic.partition(parse_number(request.path_params["partition"], -1, -1))
        segments = log.segments()[::-1]
        cleaned_offset = log.cleaned_offset
        paging = Paging(request, len(segments), _SEGMENTS)
        shown = [(one, segment_state(one, cleaned_offset)) for one in segments[paging.begin : paging.end]]
        may_read = console.may_see(request, Thing.RECORDS, topic.name)
        # As in Kafka's DescribeProducers, this requires the right to read.
        producers = log.producers() if may_read and log.handle.page.words[PRODUCERS_WORD] else []
        overview = console.overview()
        findings = [
            one for one in self._store.scrub_report().findings if (one.topic, one.partition) == (topic.name, log.number)
        ]
        return console.render(
            request, "partition.html", nav="topics", topic=topic, log=log, config=log.config, paging=paging,
            blocks=segment_strip(segments[::-1], cleaned_offset), segments=shown, epochs=log.epochs()[::-1][:50],
            lost=log.lost_ranges(), retention=_retention(log), compaction=_compaction(log), findings=findings,
            sees_config=console.may_see(request, Thing.TOPIC_CONFIG, topic.name),
            state=overview.partitions.get((topic.name, log.number)), producers=producers[:_PRODUCERS],
            producer_count=len(producers), names=self._producer_names(request) if producers else {},
            may_read=may_read,
        )  # fmt: skip

    def _producer_names(self, request: Request) -> dict[int, str]:
        """Return the producer names that the principal may see, by producer id."""
        return {
            state.producer_id: name
            for name, state in self._store.transactions.states().items()
            if self._console.may_see(request, Thing.TRANSACTIONAL_ID, name)
        }

    # ------------------------------------------------------------ changes

    def show_config_form(self, request: Request) -> Response:
        """Show the form for the configuration."""
        self._console.check_write(request, Operation.ALTER_CONFIGS, ResourceType.TOPIC, request.path_params["topic"])
        topic = self._console.topic(request, Operation.DESCRIBE_CONFIGS)
        return self._render_config_form(request, topic, {}, {})

    def change_config(self, request: Request, form: Form) -> Response:
        """Apply the changed fields of the form; errors are shown beside their fields."""
        name = request.path_params["topic"]
        self._console.check_write(request, Operation.ALTER_CONFIGS, ResourceType.TOPIC, name)
        topic = self._console.topic(request, Operation.DESCRIBE_CONFIGS)  # a form with errors shows the configuration
        config = topic.config
        given: dict[str, str] = {}
        errors: dict[str, str] = {}
        for line in config.describe():
            value = first_value(form, line.key, line.value).strip()
            if value != first_value(form, f"was:{line.key}", line.value):
                given[line.key] = value
        together = _check(config, given)
        for key, value in given.items():  # report every invalid value, but not those that depend on another key
            if together:
                errors.update(_check(config, {key: value}))
        errors = {key: why for key, why in errors.items() if key in given} or together
        count = topic.partition_count
        new_count = parse_number(first_value(form, "partitions"), count, -1, 1 << 31)
        if new_count != count:
            self._console.check_write(request, Operation.ALTER, ResourceType.TOPIC, name)
        if not errors and (given or new_count != count):
            try:
                self._store.alter_topic(name, given, partitions=new_count if new_count != count else None)
            except InvalidConfig as error:
                errors[error.key] = error.accepted
        if errors:
            return self._render_config_form(
                request, topic, {**given, "partitions": first_value(form, "partitions")}, errors
            )
        self._console.overviews.invalidate()
        return redirect_after_post(f"/topics/{name}", done="altered" if given or new_count != count else "unchanged")

    def _render_config_form(
        self, request: Request, topic: Topic, given: dict[str, str], errors: dict[str, str]
    ) -> Response:
        defaults = {line.key: line.value for line in type(topic.config)().describe()}
        may_alter = self._console.may_write(request, Operation.ALTER, ResourceType.TOPIC, topic.name)
        return self._console.render(
            request, "config.html", 422 if errors else 200, nav="topics", topic=topic, lines=topic.config.describe(),
            defaults=defaults, given=given, errors=errors, partition_count=topic.partition_count, may_alter=may_alter,
        )  # fmt: skip

    def show_delete_form(self, request: Request) -> Response:
        """Ask for the topic's name before deleting it."""
        self._console.check_write(request, Operation.DELETE, ResourceType.TOPIC, request.path_params["topic"])
        topic = self._console.topic(request)
        return self._render_delete_form(request, topic, "")

    def _render_delete_form(self, request: Request, topic: Topic, error: str) -> Response:
        seen = self._console.overview().topics.get(topic.name)
        return self._console.render(
            request, "delete.html", 422 if error else 200, nav="topics", topic=topic, seen=seen, error=error
        )

    def delete_topic(self, request: Request, form: Form) -> Response:
        """Delete the topic if the form's field contains its name, which confirms the deletion."""
        name = request.path_params["topic"]
        self._console.check_write(request, Operation.DELETE, ResourceType.TOPIC, name)
        topic = self._console.topic(request)
        if first_value(form, "name").strip() != name:
            return self._render_delete_form(request, topic, "This is not the topic's name; nothing was deleted.")
        self._store.delete_topic(name)
        self._console.overviews.invalidate()
        return redirect_after_post("/", done="deleted")


def _totals(topics: list[TopicOverview]) -> dict[str, int]:
    """Sum up all topics. In Python, because a template takes ten times as long for thousands of topics."""
    return {
        "partition_count": sum(topic.partition_count for topic in topics),
        "record_count": sum(topic.record_count for topic in topics),
        "size_bytes": sum(topic.size_bytes for topic in topics),
        "unsynced_count": sum(topic.unsynced_count for topic in topics),
    }


def _check(config: TopicConfig, changes: dict[str, str]) -> dict[str, str]:
    try:
        config.replace(changes)
    except InvalidConfig as error:
        return {error.key: error.accepted}
    return {}


def _segment_blocks(log: Partition) -> list[SegmentBlock]:
    return segment_strip(log.segments(), log.cleaned_offset)


def _retention(log: Partition) -> dict[str, Any]:
    """Return what retention would delete now."""
    try:
        report = log.apply_retention(dry_run=True)
    except (SegmentlogError, OSError) as error:
        return {"error": client_message(error)}
    return {"error": "", "removed": report.removed, "size_bytes": report.size_bytes, "busy": report.busy}


def _compaction(log: Partition) -> dict[str, Any] | None:
    if not log.config.compacts:
        return None
    note = log.cleaner_note()
    return {
        "cleaned_offset": log.cleaned_offset,
        "dirty_ratio": log.dirty_ratio(),
        "due": log.compaction_due(),
        "note": note,
    }
