"""When a standby takes over: tables of observations, and what they must lead to."""

from collections.abc import Sequence

import pytest

from segmentlog.policy.takeover_decision import OwnerWatch, ProbeResult, TakeoverDecision, TakeoverSettings

ALIVE, REFUSED, SILENT = ProbeResult.ALIVE, ProbeResult.REFUSED, ProbeResult.SILENT


class Watched:
    """A watch with a clock: each step observes manifest and probes, one second after the last."""

    def __init__(self) -> None:
        self.watch = OwnerWatch(TakeoverSettings(), "o")
        self.now_s = 1000.0

    def step(
        self, probes: Sequence[ProbeResult], nonce: str | None = "n", *, after_s: float = 1.0, has_nodes: bool = True,
        is_handed_over: bool = False, is_complete: bool = True, owner_id: str = "o",
        is_ended: bool = False,
    ) -> TakeoverDecision:  # fmt: skip
        """Observe once; ``nonce`` None: the manifest cannot be read."""
        self.now_s += after_s
        if nonce is None:
            self.watch.observe_unreadable(self.now_s)
        else:
            self.watch.observe_manifest(
                self.now_s, nonce, owner_id, has_nodes=has_nodes, is_handed_over=is_handed_over, is_ended=is_ended
            )
        self.watch.observe_probes(self.now_s, probes)
        return self.watch.decide(is_complete=is_complete)

    def due_after(self, probes: Sequence[ProbeResult], limit: int = 60) -> int:
        """Return after how many seconds of the same observation the takeover is due; -1 if never."""
        for second in range(limit):
            if self.step(probes).is_due:
                return second
        return -1


@pytest.mark.parametrize(
    ("probes", "due_s"),
    [
        ([REFUSED], 3), ([REFUSED, REFUSED], 3), ([SILENT], 8), ([REFUSED, SILENT], 8), ([ALIVE], -1),
        ([ALIVE, REFUSED, SILENT], -1),
    ],
)  # fmt: skip
def test_how_long_the_owner_must_be_gone(probes: list[ProbeResult], due_s: int) -> None:
    """A refusal counts sooner than silence; one worker that answers is enough."""
    watched = Watched()
    watched.step([ALIVE])
    for _ in range(9):
        assert not watched.step([ALIVE]).is_due
    assert watched.due_after(probes) == due_s


def test_an_answer_begins_the_period_again() -> None:
    """Seven seconds of silence, an answer, seven seconds of silence."""
    watched = Watched()
    for _ in range(3):
        watched.step([ALIVE])
        assert not any(watched.step([SILENT]).is_due for _ in range(8))


def test_an_owner_that_ships_is_alive() -> None:
    """The link between the two machines is down: the owner's port is silent, and its records reach the object store."""
    watched = Watched()
    assert not any(watched.step([SILENT], f"n{second // 7}").is_due for second in range(100))
    assert watched.due_after([SILENT]) <= 8


def test_the_owner_s_last_manifest_begins_the_period() -> None:
    """A process that dies just after it has shipped is replaced three seconds after that manifest."""
    watched = Watched()
    for second in range(5):
        assert not watched.step([REFUSED], f"n{second}").is_due
    assert watched.due_after([REFUSED]) == 3


def test_a_manifest_that_cannot_be_read_says_nothing() -> None:
    """A takeover waits while the object store is unreachable, and until the manifest stayed unchanged for long."""
    watched = Watched()
    watched.step([ALIVE])
    for _ in range(60):
        decision = watched.step([REFUSED], None)
        assert not decision.is_due
        assert "cannot be read" in decision.reason
    assert watched.due_after([REFUSED]) == 3


@pytest.mark.parametrize("gap_s", [61.0, 3600.0, -5.0])
def test_time_that_was_not_observed_does_not_count(gap_s: float) -> None:
    """The standby itself was stopped, or its clock went back: the owner may have answered meanwhile."""
    watched = Watched()
    for _ in range(3):
        watched.step([REFUSED])
    assert not watched.step([REFUSED], after_s=gap_s).is_due
    assert watched.due_after([REFUSED]) == 2  # the third second after the gap


def test_slow_cycles_take_longer() -> None:
    """Each request takes four seconds: each cycle counts as one second, and the takeover is still due in the end."""
    watched = Watched()
    watched.step([ALIVE])
    for _ in range(3):
        assert not watched.step([REFUSED], after_s=4.0).is_due
    assert watched.step([REFUSED], after_s=4.0).is_due


def test_a_short_stop_counts_as_one_second() -> None:
    """The standby was stopped for 50 seconds, and finds the same before and after."""
    watched = Watched()
    for _ in range(3):
        watched.step([REFUSED])
    assert watched.step([REFUSED], after_s=50.0).is_due  # the third second
    watched.step([ALIVE])
    watched.step([REFUSED])
    assert not watched.step([REFUSED], after_s=50.0).is_due


def test_an_owner_that_has_ended_shipping_keeps_its_store() -> None:
    """Its server may run on without shipping; a takeover would assign its offsets a second time."""
    watched = Watched()
    watched.step([ALIVE])
    for _ in range(60):
        decision = watched.step([REFUSED], is_ended=True)
        assert not decision.is_due
    assert "has ended shipping" in decision.reason


def test_a_new_owner_that_dies_before_its_first_answer() -> None:
    """An earlier owner has answered this machine, so that the network works: the takeover is due after five minutes."""
    watched = Watched()
    watched.step([ALIVE])
    for _ in range(300):
        decision = watched.step([REFUSED], owner_id="another")
        assert not decision.is_due
    assert "has never answered this machine; it has shipped nothing for 300.0 s" in decision.reason
    assert watched.step([REFUSED], owner_id="another").is_due


def test_a_store_without_a_server_is_never_taken_over() -> None:
    """Nothing shows whether local programs of the owner work or are idle; the reason names the command for a person."""
    watched = Watched()
    for _ in range(60):
        decision = watched.step([], has_nodes=False)
        assert not decision.is_due
    assert "segmentlog takeover" in decision.reason


def test_a_hand_over_is_due_at_once() -> None:
    """Even though the owner's server still answers; but not before the replica is complete."""
    watched = Watched()
    assert not watched.step([ALIVE], is_handed_over=True, is_complete=False).is_due
    assert watched.step([ALIVE], is_handed_over=True).is_due


def test_an_incomplete_replica_waits() -> None:
    """Otherwise a machine that was just started would name itself the owner, and then download for hours."""
    watched = Watched()
    assert not any(watched.step([REFUSED], is_complete=False).is_due for _ in range(60))
    assert watched.step([REFUSED]).is_due


def test_an_owner_that_never_answered_is_not_missing() -> None:
    """A wrong address or a firewall would make a healthy owner lose its store whenever it is idle."""
    watched = Watched()
    watched.watch.answered_owner = ""
    for _ in range(600):
        decision = watched.step([REFUSED], owner_id="another")
        assert not decision.is_due
    assert "never answered this machine" in decision.reason
    watched.step([ALIVE], owner_id="another")
    assert watched.watch.answered_owner == "another"
    assert not any(watched.step([REFUSED], owner_id="another").is_due for _ in range(3))
    assert watched.step([REFUSED], owner_id="another").is_due


def test_the_reason_tells_how_long() -> None:
    """The status shows it while the owner is missing, and the log when the standby takes over."""
    watched = Watched()
    watched.step([ALIVE])
    watched.step([SILENT])
    assert watched.step([SILENT]).reason == "the owner has not answered for 1.0 s; it shipped last 2.0 s ago"
    for _ in range(7):
        last = watched.step([SILENT])
    assert last == (True, "the owner does not answer, and it has shipped nothing for 8.0 s", False)
