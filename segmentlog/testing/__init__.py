"""Disks that forget, fail and die, and what a log must not do on them: for tests of segmentlog and of what uses it.

`History` remembers what a log told anybody and finds where it went back on its word. The
disks, from the fastest to the most real:

`SimulatedDisk`     a machine in memory that can be crashed at every call, in any state that
                    POSIX allows: a millisecond a crash
`WorstCaseDisk`     real files in a folder; a power cut takes everything that was not synced
`CrashFS`           a mounted folder (FUSE, extra ``[testing]``) that any process may use,
                    maps included; a crash takes a seeded choice of what was not synced
`FaultyFileSystem`  real files, and calls that fail on demand

and, for code that talks to Kafka: `pytest_plugin`, a server for each test; for servers that have to be told a port,
`ports.free_ports`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segmentlog.testing.fault_injection import Died as Died
    from segmentlog.testing.fault_injection import FaultyFileSystem as FaultyFileSystem
    from segmentlog.testing.history import Claim as Claim
    from segmentlog.testing.history import Conflict as Conflict
    from segmentlog.testing.history import History as History
    from segmentlog.testing.simulated_disk import SimulatedDisk as SimulatedDisk
    from segmentlog.testing.worst_case import WorstCaseDisk as WorstCaseDisk

_HOME_OF = {
    "SimulatedDisk": "simulated_disk",
    "Died": "fault_injection",
    "FaultyFileSystem": "fault_injection",
    "Claim": "history",
    "Conflict": "history",
    "History": "history",
    "WorstCaseDisk": "worst_case",
}


def __getattr__(name: str) -> Any:
    """When it is first used: pytest imports this package in every run, for its plugin."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'segmentlog.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"segmentlog.testing.{home}"), name)
    globals()[name] = value
    return value
