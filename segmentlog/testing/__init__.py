"""Disks that forget, fail and die, and what a log must not do on them: for tests of segmentlog and of what uses it.

`History` remembers what a log told anybody and finds where it went back on its word.
`FaultyFileSystem` fails calls on demand. `CrashFS` (`segmentlog.testing.crashfs`, extra
``[testing]``) is a mounted folder that forgets what was not synced.
"""

from segmentlog.testing.faults import Died as Died
from segmentlog.testing.faults import FaultyFileSystem as FaultyFileSystem
from segmentlog.testing.history import Claim as Claim
from segmentlog.testing.history import Conflict as Conflict
from segmentlog.testing.history import History as History
