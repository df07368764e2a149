"""The checker of delivery semantics finds each contradiction of a guarantee, and reports only contradictions."""

from __future__ import annotations

from typing import Any

import pytest
from delivery_checker import Event, Final, Place, check, check_owners, check_pipeline, gather

A, B = ("a", 0), ("b", 0)


def final(content: dict[int, str], hidden: dict[int, str] | None = None, **options: Any) -> Final:
    """Return a partition with ``content``, and ``hidden`` records that ``read_committed`` does not show."""
    everything = dict(sorted({**content, **(hidden or {})}.items()))
    end = max(everything, default=-1) + 2
    return Final(everything, content, **{"log_end_offset": end, "last_stable_offset": end, **options})


EVENTS: list[Event] = [
    ["send", "p", "", "a", 0, ["1"]],
    ["ok", "p"],
    ["send", "q", "t1", "a", 0, ["2", "3"]],
    ["ok", "q"],
    ["send", "q", "t1", "b", 0, ["4"]],
    ["ok", "q"],
    ["commit", "q", "t1"],
    ["committed", "q", "t1"],
    ["send", "q", "t2", "b", 0, ["5"]],
    ["ok", "q"],
    ["abort", "q", "t2"],
    ["handed", "r", "read_committed", "a", 0, [[0, "1"], [1, "2"], [2, "3"]]],
    ["handed", "r", "read_committed", "b", 0, [[0, "4"], [4, "6"]]],
    ["handed", "u", "read_uncommitted", "b", 0, [[0, "4"], [2, "5"]]],
    ["send", "p", "t3", "b", 0, ["6"]],
    ["commit", "p", "t3"],
]
STORE: dict[Place, Final] = {A: final({0: "1", 1: "2", 2: "3"}), B: final({0: "4", 4: "6"}, {2: "5"})}


def found(events: list[Event], store: dict[Place, Final]) -> set[str]:
    """Return the kinds of contradictions."""
    return {line.split(":")[0] for line in check(gather(events), store)}


def test_what_keeps_every_promise_passes() -> None:
    """A correct history of a correct store has no findings."""
    assert found(EVENTS, STORE) == set()


def test_an_unknown_outcome_may_be_either() -> None:
    """A transaction whose process was killed during the commit may be committed or not."""
    events = [event for event in EVENTS if event[0] != "handed"]
    assert found(events, {A: STORE[A], B: final({0: "4"}, {2: "5", 4: "6"})}) == set()


@pytest.mark.parametrize(
    ("kind", "store"),
    [
        ("lost", {A: final({1: "2", 2: "3"})}),
        ("doubled", {A: final({0: "1", 1: "2", 2: "3", 3: "1"})}),
        ("doubled", {A: final({0: "1", 1: "2", 2: "3"}, {7: "2"})}),
        ("invented", {A: final({0: "1", 1: "2", 2: "3", 3: "x"})}),
        ("uncommitted", {A: final({0: "1", 1: "2"}, {2: "3"})}),
        ("aborted", {B: final({0: "4", 2: "5", 4: "6"})}),
        ("blocked", {A: final({0: "1", 1: "2", 2: "3"}, last_stable_offset=3)}),
        ("offset", {A: final({0: "1", 1: "3", 2: "2"})}),
        ("gone", {A: final({0: "1", 1: "2", 3: "3"})}),
        ("skipped", {B: final({0: "4", 3: "7", 4: "6"}, {2: "5"})}),
        ("dirty", {B: final({0: "4"}, {2: "5", 4: "6"})}),
        ("miscounted", {A: final({0: "1", 1: "2", 2: "3", 3: "n:x:a:0:0", 4: "n:x:a:0:2"})}),
        ("miscounted", {A: final({0: "1", 1: "2", 2: "3", 3: "n:x:a:0:1", 4: "n:x:a:0:0"})}),
        ("miscounted", {A: final({0: "1", 1: "2", 2: "3", 3: "n:x:a:0:0", 4: "n:x:a:0:0"})}),
    ],
)
def test_a_corrupted_store_is_caught(kind: str, store: dict[Place, Final]) -> None:
    """The checker catches a log that lost, doubled, tore or wrongly showed records."""
    assert kind in found(EVENTS, {**STORE, **store})


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("dirty", ["handed", "x", "read_committed", "b", 0, [[2, "5"]]]),
        ("offset", ["handed", "x", "read_uncommitted", "b", 0, [[2, "4"]]]),
        ("order", ["handed", "x", "read_committed", "a", 0, [[1, "2"], [0, "1"]]]),
        ("order", ["handed", "x", "read_committed", "a", 0, [[1, "2"], [1, "2"]]]),
        ("skipped", ["handed", "x", "read_committed", "a", 0, [[0, "1"], [2, "3"]]]),
        ("skipped", ["handed", "x", "read_uncommitted", "b", 0, [[0, "4"], [4, "6"]]]),
        ("refused", ["refused", "p2"]),
        ("error", ["error", "x", "OSError"]),
    ],
)
def test_a_corrupted_history_is_caught(kind: str, event: Event) -> None:
    """The checker catches each record that a reader should not have got."""
    events = [["send", "p2", "", "a", 0, ["1"]], event] if kind == "refused" else [event]
    assert kind in found([*EVENTS, *events], STORE)


@pytest.mark.parametrize(
    ("kind", "acked"),
    [(None, [[7, "7"]]), (None, [[-1, "7"]]), ("offset", [[6, "7"]]), ("lost", [[-1, "8"]]), ("lost", [[8, "8"]])],
)
def test_what_a_producer_is_told_is_held_against_the_log(kind: str | None, acked: list[Any]) -> None:
    """An acknowledged record must exist, and be at the offset that its producer got, if it got one."""
    events: list[Event] = [*EVENTS, ["send", "p", "", "b", 0, ["7", "8"]], ["acked", "p", "b", 0, acked]]
    store = {A: STORE[A], B: final({0: "4", 4: "6", 6: "9", 7: "7"}, {2: "5"})}
    assert found([*events, ["send", "z", "", "b", 0, ["9"]]], store) == ({kind} if kind else set())


def test_what_is_not_in_the_order_in_which_it_was_sent_is_caught() -> None:
    """Records of one process in one partition must be in the order in which they were sent."""
    events: list[Event] = [["send", "p", "", "a", 0, ["1", "2"]], ["send", "p", "", "a", 0, ["3"]]]
    assert found(events, {A: final({0: "1", 1: "2", 2: "3"})}) == set()
    assert found(events, {A: final({0: "1", 2: "3"})}) == set()
    assert found(events, {A: final({0: "1", 1: "3", 2: "2"})}) == {"sent order"}
    assert found([*events[:1], ["send", "q", "", "a", 0, ["3"]]], {A: final({0: "1", 1: "3", 2: "2"})}) == set()


def test_what_was_deleted_was_there() -> None:
    """Before records are deleted, an event lists them. The checker compares all events with that list and the rest."""
    left = {A: final({2: "3"}, log_start_offset=2), B: STORE[B]}
    told: Event = ["trims", "d", "a", 0, [[0, "1", True], [1, "2", True]]]
    assert found([*EVENTS, told], left) == set()
    assert "gone" in found(EVENTS, left)
    assert "uncommitted" in found([*EVENTS, told], {A: final({2: "3"}, log_start_offset=1), B: STORE[B]})
    assert "dirty" in found([*EVENTS, ["trims", "d", "a", 0, [[0, "1", True], [1, "2", False]]]], left)
    skips: Event = ["handed", "x", "read_committed", "a", 0, [[0, "1"], [2, "3"]]]
    assert found([*EVENTS, told, skips], left) == set()
    assert "skipped" in found([*EVENTS, skips], STORE)


def test_half_of_an_unknown_transaction_is_caught() -> None:
    """A transaction with an unknown result is visible as a whole or hidden as a whole.

    Without a "commit" it is hidden.
    """
    events: list[Event] = [
        ["send", "p", "t", "a", 0, ["1"]], ["send", "p", "t", "b", 0, ["2"]], ["commit", "p", "t"],
    ]  # fmt: skip
    assert found(events, {A: final({0: "1"}), B: final({0: "2"})}) == set()
    assert found(events, {A: final({}, {0: "1"}), B: final({}, {0: "2"})}) == set()
    assert found(events, {A: final({0: "1"}), B: final({}, {0: "2"})}) == {"half"}
    assert found(events[:-1], {A: final({0: "1"}), B: final({0: "2"})}) == {"aborted"}


@pytest.mark.parametrize(
    ("wrong", "outputs"),
    [
        ("", {0: "o:0:0:x", 2: "o:0:1:y"}),
        ("2 times", {0: "o:0:0:x", 2: "o:0:1:y", 4: "o:0:1:y"}),
        ("never went", {0: "o:0:0:x"}),
        ("no committed record", {0: "o:0:0:x", 2: "o:0:1:y", 4: "o:0:5:z"}),
        ("order", {0: "o:0:1:y", 2: "o:0:0:x"}),
    ],
)
def test_a_pipeline_that_is_not_exactly_once_is_caught(wrong: str, outputs: dict[int, str]) -> None:
    """Aborted outputs do not count."""
    store = {("in", 0): final({0: "x", 1: "y"}, {5: "z"}), ("out", 0): final(outputs, {9: "o:0:0:x"})}
    said = check_pipeline(store, "in", "out")
    assert (not said) == (not wrong)
    assert not wrong or any(wrong in line for line in said)


def test_two_owners_are_caught() -> None:
    """A partition must not have two owners in one generation, or at one time if no member was evicted."""

    def owners(*events: Event, evictions: bool = False) -> list[str]:
        return check_owners(gather(list(events)), evictions=evictions)

    def owns(ns: int, member: str, generation: int) -> Event:
        return ["owns", "p", ns, member, generation, "t", 0]

    def disowns(ns: int, member: str) -> Event:
        return ["disowns", "p", ns, member, "t", 0]

    assert not owners(owns(1, "m", 1), disowns(5, "m"), owns(6, "n", 2))
    assert "at the same time" in owners(owns(1, "m", 1), disowns(5, "m"), owns(4, "n", 2))[0]
    assert not owners(owns(1, "m", 1), disowns(5, "m"), owns(4, "n", 2), evictions=True)
    assert "in generation 1" in owners(owns(1, "m", 1), disowns(5, "m"), owns(6, "n", 1), evictions=True)[0]
    assert not owners(owns(1, "m", 1), owns(6, "n", 2))  # "m" was killed
