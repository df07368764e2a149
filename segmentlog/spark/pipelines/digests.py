"""What two sets of records have in common: their count and a checksum that no order changes, made by Spark.

The checksum of a record is xxhash64 of offset, timestamp, key, value and headers, with a flag for each that may be
null: xxhash64 passes over nulls, so that a key without a value would look like a value without a key. Those of all
records are summed and xored; 32 hexadecimal digits, the sum first.
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
# A hash is summed in three pieces: the sum of whole ones would overflow, and decimals are slow.


class Digest(msgspec.Struct, frozen=True):
    """Of some records of a partition."""

    records: int = 0
    first_offset: int = -1
    last_offset: int = -1
    checksum: str = "0" * 32

    def __add__(self, other: Digest) -> Digest:
        """That of both; no record is in both of them."""
        if not self.records or not other.records:
            return self if self.records else other
        mine, theirs = int(self.checksum, 16), int(other.checksum, 16)
        return Digest(
            self.records + other.records,
            min(self.first_offset, other.first_offset),
            max(self.last_offset, other.last_offset),
            _text((mine >> 64) + (theirs >> 64), (mine ^ theirs)),
        )


NOTHING: Final = Digest()


def joined(digests: Iterable[Digest]) -> Digest:
    """That of all of them."""
    return sum(digests, NOTHING)


def digests_of(rows: DataFrame) -> dict[int, Digest]:
    """By partition, for rows of an archive with the timestamp in milliseconds; only partitions with a row."""
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
            _text((row["high"] << 44) + (row["middle"] << 22) + row["low"], row["xored"]),
        )
        for row in found.collect()
    }


def _text(total: int, xored: int) -> str:
    return f"{total & _MASK:016x}{xored & _MASK:016x}"
