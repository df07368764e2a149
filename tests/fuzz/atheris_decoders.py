"""Coverage-guided fuzzing of every decoder, with atheris.

    python tests/fuzz/atheris_decoders.py -runs=100000              all of them, by the first byte
    python tests/fuzz/atheris_decoders.py batch -max_total_time=600   one of them
    python tests/fuzz/atheris_decoders.py corpus/ -max_len=4096       with a corpus, as libFuzzer takes it

Starts from whole batches, checkpoints and index entries, so that the deeper checks are reached at once.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

with atheris.instrument_imports(include=["segmentlog", "msgspec"]):
    from batches import Columns, batch_bytes
    from fuzz.decoders import DECODERS

    from segmentlog.format.checkpoint import Checkpoint, encode_slot
    from segmentlog.format.control import encode_marker
    from segmentlog.format.producer_snapshot import (
        AbortedTransaction,
        ProducerEntry,
        SequenceRun,
        encode_aborted,
        encode_snapshot,
    )


def seeds() -> list[bytes]:
    """Return a valid example of each kind."""
    plain = batch_bytes(Columns([b"value", None], [b"k", None], headers=[(("h", None),), ()]), 5, epoch=1)
    packed = batch_bytes([b"v" * 400], 7, codec=3)
    slot = encode_slot(Checkpoint(), 3)
    made = encode_marker(1, 0, committed=False, first_offset=3, now_ms=1)
    marker = bytes(made.placed_at(9, 0)) + bytes(made.payload)
    snapshot = encode_snapshot([ProducerEntry(1, 0, (SequenceRun(0, 3, 2),), 0, 3, 5, 1)])
    aborted = encode_aborted(200, [AbortedTransaction(1, 3, 9)])
    topic = b'{"format": 1, "partitions": 1, "config": {}}'
    return [plain, packed, plain + packed, slot, slot + slot, marker, snapshot, aborted, topic]


def main() -> None:
    """Run libFuzzer; it never returns."""
    arguments = sys.argv[:]
    wanted = [name for name in arguments[1:] if name in DECODERS] or list(DECODERS)
    arguments = [one for one in arguments if one not in DECODERS]

    def one_input(data: bytes) -> None:
        if data:
            DECODERS[wanted[data[0] % len(wanted)]](data[1:])

    if not any(Path(one).is_dir() for one in arguments[1:]):
        corpus = Path(tempfile.mkdtemp(prefix="atheris-"))
        for number, seed in enumerate(seeds()):
            for turn in range(len(wanted)):
                (corpus / f"{number}-{turn}").write_bytes(bytes([turn]) + seed)
        arguments.append(str(corpus))
    atheris.Setup(arguments, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
