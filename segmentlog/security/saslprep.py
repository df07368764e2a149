"""SASLprep (RFC 4013): the same form for strings that look alike. So a password is the same from every keyboard.

Some clients prepare names and passwords, as RFC 5802 requires; Kafka's Java clients and librdkafka do not. So this
module allows only names and passwords that SASLprep leaves unchanged: all clients send them in the same form.
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
    """Return the prepared form of ``text``. Raise ValueError, without quoting ``text``, if it has none."""
    mapped = "".join(
        " " if stringprep.in_table_c12(character) else character
        for character in text
        if not stringprep.in_table_b1(character)
    )
    normal = unicodedata.ucd_3_2_0.normalize("NFKC", mapped)
    if any(is_in_table(character) for character in normal for is_in_table in _PROHIBITED):
        raise ValueError("it contains characters that SASLprep (RFC 4013) does not allow")
    if any(map(stringprep.in_table_d1, normal)) and (
        any(map(stringprep.in_table_d2, normal))
        or not (stringprep.in_table_d1(normal[0]) and stringprep.in_table_d1(normal[-1]))
    ):
        raise ValueError("it mixes writing directions, which SASLprep (RFC 4013) does not allow")
    return normal


def is_prepared(text: str) -> bool:
    """Return whether SASLprep leaves ``text`` unchanged."""
    try:
        return saslprep(text) == text
    except ValueError:
        return False


def prepared(text: str) -> str:
    """Return the prepared form of ``text``; if it has none, ``text`` itself, which is then invalid as a password."""
    try:
        return saslprep(text)
    except ValueError:
        return text
