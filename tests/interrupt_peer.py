"""The other process of the interrupt sweep: it appends on request and reports which locks are held."""

from __future__ import annotations

import fcntl
import json
import os
import sys

import segmentlog


def main() -> None:
    """Answer one line of JSON with another."""
    stores: dict[str, segmentlog.LogStore] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answer: object = None
        try:
            if request["do"] == "append":
                path = request["store"]
                for other in [other for other in stores if other != path]:
                    stores.pop(other).close()
                if path not in stores:
                    stores[path] = segmentlog.open(path, create=False, background=False)
                partition = stores[path].topic(request["topic"]).partition(0)
                answer = partition.append([request["value"].encode()], [b"peer"], ack="durable")
            else:
                answer = [path for path in request["paths"] if not _is_free(path)]
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


def _is_free(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


if __name__ == "__main__":
    main()
