"""Pages about consumer groups: the list, one group, and the form that changes its committed offsets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote

from segmentlog.consuming.start_position import StartPosition, parse_start_position, resolve_position
from segmentlog.errors import SegmentlogError
from segmentlog.http.console.charts import PLOT_HEIGHT, PLOT_WIDTH
from segmentlog.http.console.forms import Form, parse_number
from segmentlog.http.console.pages import Console, Paging, redirect_after_post
from segmentlog.http.error_responses import HttpProblem
from segmentlog.records import TopicPartition
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.security.viewer import Thing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from segmentlog.groups.group_admin import GroupDescription, PartitionDescription
    from segmentlog.records import LostRange

_GROUPS: Final = 50
_PARTITIONS: Final = 200
_TARGETS: Final = ("earliest", "latest", "offset", "time", "shift")


class Move(NamedTuple):
    """A change of one committed offset."""

    tp: TopicPartition
    old: int | None
    new: int
    lag: int
    """Offsets from the new committed offset to the end, without lost ranges."""

    @property
    def by(self) -> int | None:
        """New offset minus old offset, if there is an old offset."""
        return None if self.old is None else self.new - self.old


class GroupPages:
    """Handlers of the pages about groups."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._store = console.store

    def list_groups(self, request: Request) -> Response:
        """List every group that the principal may see."""
        part = request.query_params.get("q", "").strip().lower()
        names = [name for name in self._store.groups.names() if self._console.may_see(request, Thing.GROUP, name)]
        found = [name for name in names if part in name.lower()] if part else names
        paging = Paging(request, len(found), _GROUPS)
        extent = self._cached_ends()
        groups = [self._describe(name, *extent) for name in found[paging.begin : paging.end]]
        rows = []
        for group in groups:
            seen = self._visible(request, group)
            rows.append((group, sorted({one.topic for one in seen}), _lag(seen)))
        return self._console.render(
            request, "groups.html", nav="groups", rows=rows, paging=paging, count=len(names),
            q=request.query_params.get("q", ""),
        )  # fmt: skip

    def show_group(self, request: Request) -> Response:
        """Show one group."""
        group = self._get_group(request)
        seen = self._visible(request, group)
        hidden_count = len(group.partitions) - len(seen)
        paging = Paging(request, len(seen), _PARTITIONS)
        return self._console.render(
            request, "group.html", nav="groups", group=group, lag=_lag(seen), paging=paging,
            partitions=seen[paging.begin : paging.end], hidden_count=hidden_count,
            members=[(one, [tp for tp in one.partitions if self._console.may_see_topic(request, tp.topic)])
                     for one in group.members],
            # The history covers all partitions.
            plot=None if hidden_count else self._console.lags.plot(group.group), width=PLOT_WIDTH, height=PLOT_HEIGHT,
            may_reset=self._console.may_write(request, Operation.READ, ResourceType.GROUP, group.group),
            command=self._console.command(request, "groups", "describe", group.group),
        )  # fmt: skip

    # ------------------------------------------------------------ changing committed offsets

    def show_reset_form(self, request: Request) -> Response:
        """Show the form that changes committed offsets, with a preview once a target is chosen."""
        group = self._resettable_group(request)
        params = request.query_params
        target = params.get("to", "")
        errors: dict[str, str] = {}
        moves: list[Move] | None = None
        if target in _TARGETS and not (group.members or group.holder):
            moves = self._plan_moves(request, group, target, params.get("where", ""), params.get("topic", ""), errors)
        topics = sorted({one.topic for one in self._visible(request, group)})
        return self._console.render(
            request, "reset.html", 422 if errors else 200, nav="groups", group=group, moves=moves, errors=errors,
            target=target if target in _TARGETS else "earliest", where=params.get("where", ""), topics=topics,
            topic=params.get("topic", ""), error="",
        )  # fmt: skip

    def reset_offsets(self, request: Request, form: Form) -> Response:
        """Set the committed offsets that the preview showed."""
        group = self._resettable_group(request)
        moves = {}
        for text in form.get("move", ()):
            topic, _, rest = text.partition("/")
            partition, _, offset = rest.partition("/")
            at, to = parse_number(partition, -1, -1), parse_number(offset, -1, -1)
            if at < 0 or to < 0:
                raise HttpProblem(400, f"{text!r} is not TOPIC/PARTITION/OFFSET; nothing was changed")
            self._console.context.check(request, Operation.READ, ResourceType.TOPIC, topic)
            log = self._store.topic(topic).partition(at)
            if not log.log_start_offset <= to <= log.log_end_offset:
                raise HttpProblem(
                    409, f"offset {to} is no longer within {topic}/{at}; nothing was changed: open the preview again"
                )
            moves[TopicPartition(topic, at)] = to
        if not moves:
            raise HttpProblem(422, "the form contains no offset to change")
        self._store.groups.reset(group.group, moves)
        return redirect_after_post("/groups/group", group=group.group, done="reset")

    def _resettable_group(self, request: Request) -> GroupDescription:
        self._console.check_write(request, Operation.READ, ResourceType.GROUP, _name_of(request))
        return self._get_group(request)

    def _plan_moves(
        self,
        request: Request,
        group: GroupDescription,
        target: str,
        target_text: str,
        topic: str,
        errors: dict[str, str],
    ) -> list[Move] | None:
        place: StartPosition | None = None
        shift = 0
        try:
            if target in ("earliest", "latest"):
                place = parse_start_position(target, 0)
            elif target == "shift":
                shift = _parse_shift(target_text)
            else:
                place = parse_start_position(target_text, self._console.now_ms())
                if (place.kind == "time") != (target == "time"):
                    raise ValueError(f"{target_text!r} is not {'a time' if target == 'time' else 'an offset'}")
        except ValueError as error:
            errors["where"] = str(error)
            return None
        moves = []
        for one in group.partitions:
            tp = TopicPartition(one.topic, one.partition)
            if one.committed is None or one.log_end_offset is None or (topic and one.topic != topic):
                continue
            if not self._console.may_see(request, Thing.RECORDS, tp.topic):
                continue
            log = self._store.topic(tp.topic).partition(tp.partition)
            start, end = log.log_start_offset, log.log_end_offset
            target_offset = one.committed.offset + shift if place is None else resolve_position(place, log)
            new = min(max(target_offset, start), end)
            moves.append(Move(tp, one.committed.offset, new, log.count_offsets(new, end)))
        return moves

    # ------------------------------------------------------------ reading groups

    def _get_group(self, request: Request) -> GroupDescription:
        """Return the group of the request. Raises `HttpProblem` (404) and `Forbidden`."""
        name = _name_of(request)
        self._console.context.check(request, Operation.DESCRIBE, ResourceType.GROUP, name)
        found = self._describe(name, self._current_ends()) if name else None
        if found is None or not (found.members or found.partitions or found.holder):
            raise HttpProblem(404, f"group {name!r} does not exist: it has no members and no committed offsets")
        return found

    def _describe(
        self, name: str, end_of: Callable[[TopicPartition], int | None],
        lost_of: Callable[[TopicPartition], Sequence[LostRange]] | None = None,
    ) -> GroupDescription:  # fmt: skip
        group = self._store.groups.describe(name, end_of, lost_of)
        lag = _lag(group.partitions)
        if lag is not None:
            self._console.lags.add(name, self._console.now_ms(), lag)
        return group

    def _cached_ends(
        self,
    ) -> tuple[Callable[[TopicPartition], int | None], Callable[[TopicPartition], Sequence[LostRange]]]:
        """Return end offsets and lost ranges from the cached overview, which opens no partition."""
        states, ends = self._console.overview().partitions, self._current_ends()

        def end_of(tp: TopicPartition) -> int | None:
            state = states.get((tp.topic, tp.partition))
            return ends(tp) if state is None else state.summary.log.log_end_offset

        def lost_of(tp: TopicPartition) -> Sequence[LostRange]:
            state = states.get((tp.topic, tp.partition))
            if state is not None:
                return state.lost
            try:
                return self._store.topic(tp.topic).partition(tp.partition).lost_ranges()
            except (SegmentlogError, OSError):  # deleted since `end_of` was asked
                return ()

        return end_of, lost_of

    def _current_ends(self) -> Callable[[TopicPartition], int | None]:
        """Return current end offsets: those of the cached overview may be older than a commit."""

        def end_of(tp: TopicPartition) -> int | None:
            try:
                return self._store.topic(tp.topic).partition(tp.partition).log_end_offset
            except (SegmentlogError, OSError):
                return None

        return end_of

    def _visible(self, request: Request, group: GroupDescription) -> list[PartitionDescription]:
        return [one for one in group.partitions if self._console.may_see_topic(request, one.topic)]


def _name_of(request: Request) -> str:
    """Return the group name of the request. Forms send it percent-encoded: browsers change hidden fields."""
    params = request.query_params
    return params["group"] if "group" in params else unquote(params.get("quoted", ""))


def _parse_shift(text: str) -> int:
    digits = text.strip().removeprefix("+")
    if not digits.removeprefix("-").isdecimal() or len(digits) > 19:
        raise ValueError(f"{text!r} is not a number of offsets such as -100")
    return int(digits)


def _lag(partitions: Iterable[PartitionDescription]) -> int | None:
    lags = [one.lag for one in partitions if one.lag is not None]
    return sum(lags) if lags else None
