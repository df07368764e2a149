"""The pages about topics and partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from segmentlog.errors import InvalidConfig, SegmentlogError, UnknownTopic
from segmentlog.http.console.charts import Block, state_of, strip
from segmentlog.http.console.forms import Form, first, number
from segmentlog.http.console.pages import Console, Paging, address, away
from segmentlog.http.console.topic_overview import TopicLook
from segmentlog.http.error_responses import words_of
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
"""A partition with more segments has its strip on its own page: each is looked at."""
_PRODUCERS: Final = 100

_SORTS: Final[dict[str, Callable[[TopicLook], Any]]] = {
    "name": lambda topic: topic.name,
    "partitions": lambda topic: topic.partition_count,
    "records": lambda topic: topic.record_count,
    "size": lambda topic: topic.size_bytes,
    "rate": lambda topic: topic.rate or 0.0,
    "risk": lambda topic: (topic.unsynced_count, topic.unsynced_s),
    "damage": lambda topic: topic.trouble,
}


class TopicPages:
    """The list of topics; one topic, its configuration, its deletion; one partition."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._store = console.store

    # ------------------------------------------------------------ all of them

    def all(self, request: Request) -> Response:
        """Every topic that who asks may see."""
        params = request.query_params
        console = self._console
        look = console.look()
        part = params.get("q", "").strip().lower()
        with_internal = params.get("internal") == "1"
        seen = [
            topic
            for topic in look.topics.values()
            if (with_internal or not topic.is_internal) and self._console.may_topic(request, topic.name)
        ]
        found = [topic for topic in seen if part in topic.name.lower()] if part else seen
        sort = params.get("sort", "name") if params.get("sort") in _SORTS else "name"
        descends = params.get("dir", "asc" if sort == "name" else "desc") == "desc"
        found.sort(key=lambda topic: topic.name)
        found.sort(key=_SORTS[sort], reverse=descends)
        paging = Paging(request, len(found), _TOPICS)
        return self._console.render(
            request, "topics.html", nav="topics", look=look, seen=seen, found=found, paging=paging,
            totals=_totals(found),
            topics=[(topic, console.may_see(request, Thing.TOPIC_CONFIG, topic.name))
                    for topic in found[paging.begin : paging.end]], sort=sort, descends=descends, q=params.get("q", ""),
            with_internal=with_internal, age_s=max((self._console.now_ms() - look.at_ms) / 1000, 0.0),
            are_rates_due=look.over_s == 0.0, sort_address=self._sort_address(request, sort, descends=descends),
        )  # fmt: skip

    def _sort_address(self, request: Request, sort: str, *, descends: bool) -> Callable[[str], str]:
        params = request.query_params

        def to(column: str) -> str:
            other = ("asc" if descends else "desc") if column == sort else ("asc" if column == "name" else "desc")
            return address("/", q=params.get("q"), internal=params.get("internal"), sort=column, dir=other)

        return to

    # ------------------------------------------------------------ one

    def show(self, request: Request) -> Response:
        """One topic."""
        console = self._console
        topic = console.topic(request)
        name = topic.name
        look = console.look()
        if name not in look.topics or look.topics[name].id != topic.id:  # made just now
            console.survey.forget()
            look = console.look()
        seen = look.topics.get(name)
        if seen is None:
            raise UnknownTopic(name)
        paging = Paging(request, seen.partition_count, _PARTITIONS)
        partitions = [self._row(topic, at, look.partitions.get((name, at))) for at in range(paging.begin, paging.end)]
        sees_config = console.may_see(request, Thing.TOPIC_CONFIG, name)
        return console.render(
            request, "topic.html", nav="topics", topic=seen, partitions=partitions, paging=paging, look=look,
            config=topic.config.describe() if sees_config else None,
            may_read=console.may_see(request, Thing.RECORDS, name),
            may_alter=console.may_write(request, Operation.ALTER_CONFIGS, ResourceType.TOPIC, name),
            may_delete=console.may_write(request, Operation.DELETE, ResourceType.TOPIC, name),
        )  # fmt: skip

    def _row(self, topic: Topic, number: int, state: Any) -> dict[str, Any]:
        row: dict[str, Any] = {"number": number, "state": state, "blocks": None, "error": ""}
        if state is None or state.segment_count <= _STRIP_SEGMENTS:
            try:
                row["blocks"] = _blocks(topic.partition(number))
            except (SegmentlogError, OSError) as error:
                row["error"] = self._console.site.problem_of(error).message
        return row

    def partition(self, request: Request) -> Response:
        """One partition: segments, epochs, what was lost, retention, compaction, producers."""
        console = self._console
        topic = console.topic(request)
        log = topic.partition(number(request.path_params["partition"], -1, -1))
        segments = log.segments()[::-1]
        cleaned_offset = log.cleaned_offset
        paging = Paging(request, len(segments), _SEGMENTS)
        shown = [(one, state_of(one, cleaned_offset)) for one in segments[paging.begin : paging.end]]
        may_read = console.may_see(request, Thing.RECORDS, topic.name)
        # As DescribeProducers has it, that takes the right to read.
        producers = log.producers() if may_read and log.handle.page.words[PRODUCERS_WORD] else []
        look = console.look()
        findings = [
            one for one in self._store.scrub_report().findings if (one.topic, one.partition) == (topic.name, log.number)
        ]
        return console.render(
            request, "partition.html", nav="topics", topic=topic, log=log, config=log.config, paging=paging,
            blocks=strip(segments[::-1], cleaned_offset), segments=shown, epochs=log.epochs()[::-1][:50],
            lost=log.lost_ranges(), retention=_retention(log), compaction=_compaction(log), findings=findings,
            sees_config=console.may_see(request, Thing.TOPIC_CONFIG, topic.name),
            state=look.partitions.get((topic.name, log.number)), producers=producers[:_PRODUCERS],
            producer_count=len(producers), names=self._producer_names(request) if producers else {},
            may_read=may_read,
        )  # fmt: skip

    def _producer_names(self, request: Request) -> dict[int, str]:
        """By their ids, those that who asks may see."""
        return {
            state.producer_id: name
            for name, state in self._store.transactions.states().items()
            if self._console.may_see(request, Thing.TRANSACTIONAL_ID, name)
        }

    # ------------------------------------------------------------ changing one

    def edit(self, request: Request) -> Response:
        """The form for the configuration."""
        self._console.check_write(request, Operation.ALTER_CONFIGS, ResourceType.TOPIC, request.path_params["topic"])
        topic = self._console.topic(request, Operation.DESCRIBE_CONFIGS)
        return self._form(request, topic, {}, {})

    def alter(self, request: Request, form: Form) -> Response:
        """Change what is another value than the form had; errors come back beside their fields."""
        name = request.path_params["topic"]
        self._console.check_write(request, Operation.ALTER_CONFIGS, ResourceType.TOPIC, name)
        topic = self._console.topic(request, Operation.DESCRIBE_CONFIGS)  # a form with errors shows all of it
        config = topic.config
        given: dict[str, str] = {}
        errors: dict[str, str] = {}
        for line in config.describe():
            value = first(form, line.key, line.value).strip()
            if value != first(form, f"was:{line.key}", line.value):
                given[line.key] = value
        together = _check(config, given)
        for key, value in given.items():  # every one that is wrong, not only the first; but not for lack of another
            if together:
                errors.update(_check(config, {key: value}))
        errors = {key: why for key, why in errors.items() if key in given} or together
        count = topic.partition_count
        wanted = number(first(form, "partitions"), count, -1, 1 << 31)
        if wanted != count:
            self._console.check_write(request, Operation.ALTER, ResourceType.TOPIC, name)
        if not errors and (given or wanted != count):
            try:
                self._store.alter_topic(name, given, partitions=wanted if wanted != count else None)
            except InvalidConfig as error:
                errors[error.key] = error.accepted
        if errors:
            return self._form(request, topic, {**given, "partitions": first(form, "partitions")}, errors)
        self._console.survey.forget()
        return away(f"/topics/{name}", done="altered" if given or wanted != count else "unchanged")

    def _form(self, request: Request, topic: Topic, given: dict[str, str], errors: dict[str, str]) -> Response:
        defaults = {line.key: line.value for line in type(topic.config)().describe()}
        may_alter = self._console.may_write(request, Operation.ALTER, ResourceType.TOPIC, topic.name)
        return self._console.render(
            request, "config.html", 422 if errors else 200, nav="topics", topic=topic, lines=topic.config.describe(),
            defaults=defaults, given=given, errors=errors, partition_count=topic.partition_count, may_alter=may_alter,
        )  # fmt: skip

    def ask_delete(self, request: Request) -> Response:
        """The page that has one type the name."""
        self._console.check_write(request, Operation.DELETE, ResourceType.TOPIC, request.path_params["topic"])
        topic = self._console.topic(request)
        return self._ask_delete(request, topic, "")

    def _ask_delete(self, request: Request, topic: Topic, error: str) -> Response:
        seen = self._console.look().topics.get(topic.name)
        return self._console.render(
            request, "delete.html", 422 if error else 200, nav="topics", topic=topic, seen=seen, error=error
        )

    def delete(self, request: Request, form: Form) -> Response:
        """Delete it, if its name was typed."""
        name = request.path_params["topic"]
        self._console.check_write(request, Operation.DELETE, ResourceType.TOPIC, name)
        topic = self._console.topic(request)
        if first(form, "name").strip() != name:
            return self._ask_delete(request, topic, "That is not the topic's name.")
        self._store.delete_topic(name)
        self._console.survey.forget()
        return away("/", done="deleted")


def _totals(topics: list[TopicLook]) -> dict[str, int]:
    """Here and not in the page: over thousands it is ten times as fast."""
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


def _blocks(log: Partition) -> list[Block]:
    return strip(log.segments(), log.cleaned_offset)


def _retention(log: Partition) -> dict[str, Any]:
    """What would go now."""
    try:
        report = log.retain(dry_run=True)
    except (SegmentlogError, OSError) as error:
        return {"error": words_of(error)}
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
