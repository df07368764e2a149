"""No name leaves the store's folder, and every segment's name gives back its base offset."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segmentlog.errors import InvalidTopicName
from segmentlog.format.file_names import (
    HIDDEN,
    INTERNAL_TOPICS,
    MAX_NAME_LENGTH,
    STORE_FILE,
    check_topic_name,
    parse_segment_name,
    segment_name,
)


@pytest.mark.parametrize(
    "name", ["clicks", "a", "A.b_c-9", "..a", "a..", "...", "-", "_", "_x", "0", "a" * 249, "con", "__x", "__", "___"]
)
def test_names_that_kafka_allows_are_names(name):
    """Letters, digits, dots, underscores and hyphens, up to 249 of them, make a name; it comes back unchanged."""
    assert check_topic_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *["", ".", "..", "a" * 250, "a/b", "../a", "/etc", "a\\b", "a b", "a\0", "a\n", "\n", "a:b", "*", "~", "ä"],
        *["\uff41", "\u0663", "\ud800", f"a{HIDDEN}deleted-1", STORE_FILE, *sorted(INTERNAL_TOPICS)],
    ],
    ids=ascii,
)
def test_names_that_kafka_forbids_are_refused(name):
    """Empty, too long, with any other character, a path, the store's own file: none of them is a name."""
    with pytest.raises(InvalidTopicName) as caught:
        check_topic_name(name)
    assert caught.value.name == name


@pytest.mark.parametrize("name", [None, 5, b"clicks", ["a"], True, ...], ids=repr)
def test_what_is_no_text_is_no_name(name):
    """Anything but a str is refused with its type, and not with an AttributeError."""
    with pytest.raises(InvalidTopicName, match=type(name).__name__):
        check_topic_name(name)


@pytest.mark.parametrize("name", sorted(INTERNAL_TOPICS))
def test_internal_names_are_for_the_store_alone(name):
    """The two topics in which the store keeps its own records, and no other name with two underscores in front."""
    with pytest.raises(InvalidTopicName, match="reserved for an internal topic of the store"):
        check_topic_name(name)
    assert check_topic_name(name, internal=True) == name


@given(name=st.text(max_size=300) | st.text(alphabet="a._-/@\0", max_size=6))
def test_no_name_leaves_the_folder(name):
    """An accepted name is one entry of the store's folder, and fits Kafka's pattern; all others are refused."""
    legal = (
        re.fullmatch(r"[a-zA-Z0-9._-]{1,249}", name)
        and name not in (".", "..", STORE_FILE)
        and name not in INTERNAL_TOPICS
    )  # fmt: skip
    try:
        check_topic_name(name)
    except InvalidTopicName:
        assert not legal
        return
    assert legal
    assert os.path.dirname(os.path.normpath(f"/store/{name}")) == "/store"
    assert len(os.fsencode(name)) <= MAX_NAME_LENGTH


@given(base_offset=st.integers(0, 2**63 - 1))
def test_the_name_of_a_segment_gives_back_its_base_offset(base_offset):
    """The 20 digits of a segment's name are its base offset, so that names sort as offsets do."""
    name = segment_name(base_offset)
    assert len(name) == 20
    assert parse_segment_name(f"{name}.log") == base_offset


@given(first=st.integers(0, 2**63 - 1), second=st.integers(0, 2**63 - 1))
def test_names_of_segments_sort_as_their_offsets(first, second):
    """Listing a folder in the order of names lists the segments in the order of offsets."""
    assert (segment_name(first) < segment_name(second)) == (first < second)


@pytest.mark.parametrize(
    "name",
    [
        *["", ".log", "state", "lock", "0.log", "0" * 19 + ".log", "0" * 21 + ".log"],
        *["0" * 20 + suffix for suffix in ("", ".index", ".timeindex", ".LOG", ".log.tmp", ".log.deleted")],
        *[" " * 19 + "1.log", "+" + "0" * 19 + ".log", "-" + "0" * 19 + ".log", "1_" * 10 + ".log"],
        *["\u0663" * 20 + ".log", "²" * 20 + ".log", "9" * 20 + ".log", "09223372036854775808.log"],
    ],
    ids=ascii,
)
def test_other_files_are_no_segments(name):
    """Only 20 digits that are an offset, with .log, name a segment; other files in the folder are ignored."""
    assert parse_segment_name(name) is None
