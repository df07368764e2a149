"""The pages about consumer groups: all of them, one, and moving its positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote

from segmentlog.consuming.start_position import StartPosition, parse_start_position, resolve_position
from segmentlog.errors import SegmentlogError
from segmentlog.http.console.charts import PLOT_HEIGHT, PLOT_WIDTH
from segmentlog.http.console.forms import Form, number
from segmentlog.http.console.pages import Console, Paging, away
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
    """Where a position is, and where it would be."""

    tp: TopicPartition
    old: int | None
    new: int
    lag: int
    """Offsets from there to the end, without lost ranges."""

    @property
    def by(self) -> int | None:
        """How far; None where there was none."""
        return None if self.old is None else self.new - self.old


class GroupPages:
    """Groups, one group, and its reset with a preview."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._store = console.store

    def all(self, request: Request) -> Response:
        """Every group that who asks may see."""
        part = request.query_params.get("q", "").strip().lower()
        names = [name for name in self._store.groups.names() if self._console.may_see(request, Thing.GROUP, name)]
        found = [name for name in names if part in name.lower()] if part else names
        paging = Paging(request, len(found), _GROUPS)
        extent = self._known_extent()
        groups = [self._describe(name, *extent) for name in found[paging.begin : paging.end]]
        rows = []
        for group in groups:
            seen = self._visible(request, group)
            rows.append((group, sorted({one.topic for one in seen}), _lag(seen)))
        return self._console.render(
            request, "groups.html", nav="groups", rows=rows, paging=paging, count=len(names),
            q=request.query_params.get("q", ""),
        )  # fmt: skip

    def show(self, request: Request) -> Response:
        """One group."""
        group = self._existing(request)
        seen = self._visible(request, group)
        hidden_count = len(group.partitions) - len(seen)
        paging = Paging(request, len(seen), _PARTITIONS)
        return self._console.render(
            request, "group.html", nav="groups", group=group, lag=_lag(seen), paging=paging,
            partitions=seen[paging.begin : paging.end], hidden_count=hidden_count,
            members=[(one, [tp for tp in one.partitions if self._console.may_topic(request, tp.topic)])
                     for one in group.members],
            # What was seen of the past is of all partitions.
            plot=None if hidden_count else self._console.lags.plot(group.group), width=PLOT_WIDTH, height=PLOT_HEIGHT,
            may_reset=self._console.may_write(request, Operation.READ, ResourceType.GROUP, group.group),
            command=self._console.command(request, "groups", "describe", group.group),
        )  # fmt: skip

    # ------------------------------------------------------------ moving positions

    def ask_reset(self, request: Request) -> Response:
        """The form, and what it would do once it says where to."""
        group = self._to_reset(request)
        params = request.query_params
        target = params.get("to", "")
        errors: dict[str, str] = {}
        moves: list[Move] | None = None
        if target in _TARGETS and not (group.members or group.holder):
            moves = self._moves(request, group, target, params.get("where", ""), params.get("topic", ""), errors)
        topics = sorted({one.topic for one in self._visible(request, group)})
        return self._console.render(
            request, "reset.html", 422 if errors else 200, nav="groups", group=group, moves=moves, errors=errors,
            target=target if target in _TARGETS else "earliest", where=params.get("where", ""), topics=topics,
            topic=params.get("topic", ""), error="",
        )  # fmt: skip

    def reset(self, request: Request, form: Form) -> Response:
        """Move the positions to where the preview said."""
        group = self._to_reset(request)
        moves = {}
        for text in form.get("move", ()):
            topic, _, rest = text.partition("/")
            partition, _, offset = rest.partition("/")
            at, to = number(partition, -1, -1), number(offset, -1, -1)
            if at < 0 or to < 0:
                raise HttpProblem(400, f"{text!r} is not TOPIC/PARTITION/OFFSET")
            self._console.site.check(request, Operation.READ, ResourceType.TOPIC, topic)
            log = self._store.topic(topic).partition(at)
            if not log.log_start_offset <= to <= log.log_end_offset:
                raise HttpProblem(409, f"{topic}/{at} begins or ends elsewhere by now: look at the preview again")
            moves[TopicPartition(topic, at)] = to
        if not moves:
            raise HttpProblem(422, "there is no position to move")
        self._store.groups.reset(group.group, moves)
        return away("/groups/group", group=group.group, done="reset")

    def _to_reset(self, request: Request) -> GroupDescription:
        self._console.check_write(request, Operation.READ, ResourceType.GROUP, _name_of(request))
        return self._existing(request)

    def _moves(
        self, request: Request, group: GroupDescription, target: str, where: str, topic: str, errors: dict[str, str]
    ) -> list[Move] | None:
        place: StartPosition | None = None
        shift = 0
        try:
            if target in ("earliest", "latest"):
                place = parse_start_position(target, 0)
            elif target == "shift":
                shift = _as_shift(where)
            else:
                place = parse_start_position(where, self._console.now_ms())
                if (place.kind == "time") != (target == "time"):
                    raise ValueError(f"{where!r} is not {'a time' if target == 'time' else 'an offset'}")
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
            wanted = one.committed.offset + shift if place is None else resolve_position(place, log)
            new = min(max(wanted, start), end)
            moves.append(Move(tp, one.committed.offset, new, log.count_offsets(new, end)))
        return moves

    # ------------------------------------------------------------ looking

    def _existing(self, request: Request) -> GroupDescription:
        """Raises `HttpProblem` for one that there is not, and `Forbidden`."""
        name = _name_of(request)
        self._console.site.check(request, Operation.DESCRIBE, ResourceType.GROUP, name)
        found = self._describe(name, self._ends()) if name else None
        if found is None or not (found.members or found.partitions or found.holder):
            raise HttpProblem(404, f"group {name!r} has no members and no positions")
        return found

    def _describe(
        self, name: str, end_of: Callable[[TopicPartition], int | None],
        lost_of: Callable[[TopicPartition], Sequence[LostRange]] | None = None,
    ) -> GroupDescription:  # fmt: skip
        group = self._store.groups.describe(name, end_of, lost_of)
        lag = _lag(group.partitions)
        if lag is not None:
            self._console.lags.note(name, self._console.now_ms(), lag)
        return group

    def _known_extent(
        self,
    ) -> tuple[Callable[[TopicPartition], int | None], Callable[[TopicPartition], Sequence[LostRange]]]:
        """Where logs ended a moment ago and what they had lost, without opening one: for many groups at once."""
        states, ends = self._console.look().partitions, self._ends()

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

    def _ends(self) -> Callable[[TopicPartition], int | None]:
        """Where logs end now: the last look at all of them is a moment old, and may be behind what is committed."""

        def end_of(tp: TopicPartition) -> int | None:
            try:
                return self._store.topic(tp.topic).partition(tp.partition).log_end_offset
            except (SegmentlogError, OSError):
                return None

        return end_of

    def _visible(self, request: Request, group: GroupDescription) -> list[PartitionDescription]:
        return [one for one in group.partitions if self._console.may_topic(request, one.topic)]


def _name_of(request: Request) -> str:
    """The group of the address. A form has it quoted: browsers change some characters of a field that is not seen."""
    params = request.query_params
    return params["group"] if "group" in params else unquote(params.get("quoted", ""))


def _as_shift(text: str) -> int:
    wanted = text.strip().removeprefix("+")
    if not wanted.removeprefix("-").isdecimal() or len(wanted) > 19:
        raise ValueError(f"{text!r} is not a number of offsets, as in -100")
    return int(wanted)


def _lag(partitions: Iterable[PartitionDescription]) -> int | None:
    lags = [one.lag for one in partitions if one.lag is not None]
    return sum(lags) if lags else None
