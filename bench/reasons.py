"""Why we lose where we lose: what a profiler showed, said once here and quoted by every report."""

from __future__ import annotations

_UNKNOWN = "Not looked into yet."

_LIMITS = {
    "append lists, keyed, uncompressed": (
        "Appending touches each value and key twice, to check its type and to encode it: as long as the page cache"
        " takes to swallow the batch uncompressed."
    ),
    "producer.send, one at a time": "Half a microsecond a call before anything is encoded.",
    "segmentlog produce FILE": "0.2 s of it are the start of Python and numpy.",
    "segmentlog consume --values": "0.2 s of it are the start of Python and numpy.",
    "append one record, durable": (
        "30 to 45 us of Python, most of it with caches that went cold during the fsync; see the rows of one writer."
    ),
    "32 threads, durable, against one": "Each thread pays for its own call and for being woken, under one interpreter.",
}

_PEERS: dict[tuple[str, str, str], str] = {}


def reason_for(bench: str, *what: str) -> str:
    """A sentence; for what nobody has explained yet, one that says so."""
    if bench == "limits":
        return _LIMITS.get(what[0], _UNKNOWN)
    workload, sync, system = what
    for key in ((workload, sync, system), (workload, "", system), (workload, sync, ""), (workload, "", "")):
        if key in _PEERS:
            return _PEERS[key]
    return _UNKNOWN
