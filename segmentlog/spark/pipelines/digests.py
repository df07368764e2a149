"""Compute digests of sets of records with Spark: their count, and a checksum that does not depend on their order.

The hash of a record is xxhash64 of offset, timestamp, key, value and headers, with a flag for each nullable field.
The flags are necessary because xxhash64 ignores nulls: otherwise a record with only a key would equal a record with
only a value of the same bytes. The checksum is the sum and the xor of all hashes: 32 hexadecimal digits, the sum first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MASK: Final = (1 << 64) - 1
_HASH: Final = (
    "xxhash64(offset, timestamp, key IS NULL, key, value IS NULL, value, headers IS NULL,"
    " transform(headers, one -> struct(one.key, one.value IS NULL, one.value)))"
)
_PIECE: Final = (1 << 22) - 1
# Hashes are summed in three pieces: a sum of whole hashes would overflow, and decimals are slow.


class Digest(msgspec.Struct, frozen=True):
    """Digest of a set of records of one partition."""

    records: int = 0
    first_offset: int = -1
    last_offset: int = -1
    checksum: str = "0" * 32

    def __add__(self, other: Digest) -> Digest:
        """Return the digest of the union of two disjoint sets."""
        if not self.records or not other.records:
            return self if self.records else other
        mine, theirs = int(self.checksum, 16), int(other.checksum, 16)
        return Digest(
            self.records + other.records,
            min(self.first_offset, other.first_offset),
            max(self.last_offset, other.last_offset),
            _format_checksum((mine >> 64) + (theirs >> 64), (mine ^ theirs)),
        )


NOTHING: Final = Digest()


def combine_digests(digests: Iterable[Digest]) -> Digest:
    """Return the digest of the union of disjoint sets."""
    return sum(digests, NOTHING)


def compute_digests(rows: DataFrame) -> dict[int, Digest]:
    """Return the digests of an archive's rows, by partition; only partitions with rows.

    The timestamp must be in milliseconds.
    """
    hashed = rows.select("partition", "offset", F.expr(_HASH).alias("hash"))
    found = hashed.groupBy("partition").agg(
        F.count("*").alias("records"),
        F.min("offset").alias("first"),
        F.max("offset").alias("last"),
        F.expr(f"sum(hash & {_PIECE})").alias("low"),
        F.expr(f"sum(shiftright(hash, 22) & {_PIECE})").alias("middle"),
        F.expr("sum(shiftright(hash, 44))").alias("high"),
        F.expr("bit_xor(hash)").alias("xored"),
    )
    return {
        row["partition"]: Digest(
            row["records"],
            row["first"],
            row["last"],
            _format_checksum((row["high"] << 44) + (row["middle"] << 22) + row["low"], row["xored"]),
        )
        for row in found.collect()
    }


def _format_checksum(total: int, xored: int) -> str:
    return f"{total & _MASK:016x}{xored & _MASK:016x}"
