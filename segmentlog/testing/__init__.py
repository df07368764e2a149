"""Test tools for segmentlog and for applications that use it: disks that fail, and disks that lose unsynced data.

`History` records every record that a log acknowledged or returned, and finds contradictions. The disks,
from the fastest to the most realistic:

`SimulatedDisk`     a machine in memory that can crash at every call, in any state that POSIX
                    allows: a millisecond per crash
`WorstCaseDisk`     real files in a folder; a power cut loses everything that was not synced
`CrashFS`           a mounted folder (FUSE, extra ``[testing]``) that any process can use, also
                    with memory maps; a crash loses a seeded choice of the unsynced data
`FaultyFileSystem`  real files, and calls that fail on demand

For code that talks to Kafka, `pytest_plugin` starts a server for each test. `ports.free_ports` finds ports for servers
that need a fixed port.
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
    """Import a class on first use: pytest imports this package in every run, for its plugin."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'segmentlog.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"segmentlog.testing.{home}"), name)
    globals()[name] = value
    return value
