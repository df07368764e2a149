"""Regular expressions over the names of topics: RE2's syntax, whole names, and never for long."""

from __future__ import annotations

import sys
import time

import pytest

from segmentlog.policy.topic_pattern import BadPattern, TopicPattern


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("orders", ["orders"], ["orders2", "my-orders", ""]),
        ("^orders.*$", ["orders", "orders.eu"], ["my-orders"]),
        ("a|b+|", ["a", "bb", ""], ["ab"]),
        ("(eu|us)[.-]x{2,3}", ["eu.xx", "us-xxx"], ["eu.x", "us-xxxx", "eu_xx"]),
        (r"[[:upper:]][[:^digit:]]", ["Ab"], ["A1", "ab"]),
        (r"(?i)Or(?-i:D)ers", ["oRDErs"], ["ordErs"]),
        (r"(?P<region>eu|us)\d", ["eu1"], ["eu"]),
        (r"\Qa.b\E+", ["a.b", "a.bb"], ["aab", "a.ba.b"]),
        (r"\pL\p{Nd}\P{L}", ["a1-"], ["a1x"]),
    ],
)
def test_syntax(pattern: str, matching: list[str], others: list[str]) -> None:
    """Patterns have RE2's syntax, and a name must match as a whole."""
    assert TopicPattern(pattern).matching([*matching, *others]) == matching


@pytest.mark.parametrize(
    "pattern",
    ["(", "a)", "[b-a]", "*", "a**", "a{1001}", r"\1", "(?=a)", r"\p{Klingon}", "((a{100}){9}){9}", "a" * 5000],
)
def test_what_is_refused(pattern: str) -> None:
    """A pattern that RE2 does not support, or that is too large, is refused with the reason."""
    with pytest.raises(BadPattern, match=r"\w{2}"):
        TopicPattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["(a*)*b", "(a|a)*b", "(a?){200}b", "((a|b)*a(a|b){50})*-", "(" + "|".join(["(a|b)*a(a|b){40}"] * 10) + ")c"],
)
def test_nothing_takes_long(pattern: str) -> None:
    """Expressions that keep a backtracking matcher busy forever end soon."""
    names = [f"{n * 2654435761 % 2**249:0249b}".replace("0", "a").replace("1", "b") for n in range(100)]
    began_s = time.process_time()
    assert TopicPattern(pattern).matching(names) == []
    assert time.process_time() - began_s < 20


def test_without_re2(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was installed without it says what is missing."""
    monkeypatch.setitem(sys.modules, "re2", None)
    with pytest.raises(BadPattern, match="pip install google-re2"):
        TopicPattern("a")
