"""SASLprep (RFC 4013): one spelling for what looks alike, so that passwords typed on different keyboards are equal.

Some clients prepare names and passwords (RFC 5802 wants it), Kafka's own and librdkafka do not. So users only get names
and passwords that preparing leaves as they are: those every client sends alike.
"""

from __future__ import annotations

import stringprep
import unicodedata
from typing import Final

_PROHIBITED: Final = (
    stringprep.in_table_a1,  # not assigned in Unicode 3.2
    stringprep.in_table_c12,
    stringprep.in_table_c21_c22,
    stringprep.in_table_c3,
    stringprep.in_table_c4,
    stringprep.in_table_c5,
    stringprep.in_table_c6,
    stringprep.in_table_c7,
    stringprep.in_table_c8,
    stringprep.in_table_c9,
)


def saslprep(text: str) -> str:
    """The prepared form. Raises ValueError, which says nothing of the text, for what has none."""
    mapped = "".join(
        " " if stringprep.in_table_c12(character) else character
        for character in text
        if not stringprep.in_table_b1(character)
    )
    normal = unicodedata.ucd_3_2_0.normalize("NFKC", mapped)
    if any(is_in_table(character) for character in normal for is_in_table in _PROHIBITED):
        raise ValueError("it has characters that SASLprep (RFC 4013) does not allow")
    if any(map(stringprep.in_table_d1, normal)) and (
        any(map(stringprep.in_table_d2, normal))
        or not (stringprep.in_table_d1(normal[0]) and stringprep.in_table_d1(normal[-1]))
    ):
        raise ValueError("it mixes directions of writing as SASLprep (RFC 4013) does not allow")
    return normal


def is_prepared(text: str) -> bool:
    """Whether the text is its own prepared form."""
    try:
        return saslprep(text) == text
    except ValueError:
        return False


def prepared(text: str) -> str:
    """As the users file has it; what cannot be prepared fits nobody there, and is taken as it is."""
    try:
        return saslprep(text)
    except ValueError:
        return text
