"""What the benchmarks write: about 100 bytes of JSON a record, keys of ten bytes, always the same."""

from __future__ import annotations

import json
import random

import msgspec


class Workload(msgspec.Struct, frozen=True):
    """Lists of values and keys, ``batch_records`` each."""

    values: list[list[bytes]]
    keys: list[list[bytes]]

    @property
    def record_count(self) -> int:
        return sum(map(len, self.values))


def json_records(batches: int, batch_records: int, seed: int = 1) -> Workload:
    """``batches`` lists of distinct records such as a web shop logs."""
    rng = random.Random(seed)
    values, keys = [], []
    for number in range(batches):
        rows, names = [], []
        for index in range(batch_records):
            user = rng.randrange(100_000)
            row = {
                "id": number * batch_records + index,
                "user": f"user-{user}",
                "ts": 1_700_000_000_000 + number * 977 + index,
                "amount": round(rng.random() * 1000, 2),
                "paid": rng.random() < 0.5,
                "item": rng.choice(("book", "lamp", "chair", "table", "pen")),
            }
            rows.append(json.dumps(row).encode())
            names.append(b"user-%05d" % user)
        values.append(rows)
        keys.append(names)
    return Workload(values, keys)
