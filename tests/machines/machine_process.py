"""The command line of segmentlog on a machine of a test: machine_process.py ARGUMENTS...

MACHINE_BOOT      id of the boot: another one after each power cut
MACHINE_SABOTAGE  a precaution that this machine goes without
"""

from __future__ import annotations

import os
from functools import partial

from machines.sabotage import SABOTAGE

from segmentlog.cli import main
from segmentlog.objects import takeover
from segmentlog.objects.ownership import claim
from segmentlog.objects.standby import roles
from segmentlog.server import server_settings
from segmentlog.server.groups.classic_types import GroupSettings
from segmentlog.storage.fs import FileSystem


def prepare() -> None:
    """Apply the settings of the environment to this process and its children."""
    boot = os.environ["MACHINE_BOOT"]
    FileSystem.boot_id = lambda self: boot  # type: ignore[method-assign]
    # Members of groups are killed: others must not wait for them for six seconds, which is the shortest by default.
    groups = GroupSettings(min_session_timeout_ms=100)
    server_settings.ServerSettings = partial(server_settings.ServerSettings, groups=groups)  # type: ignore[misc]
    # A disk of the test has another device number after each power cut, and its folders have other inode numbers.
    for module in (claim, roles, takeover):
        module.folder_id = lambda fs, path: (0, 0)  # type: ignore[attr-defined]
    if name := os.environ.get("MACHINE_SABOTAGE"):
        SABOTAGE[name]()


if __name__ == "__main__":
    prepare()
    main()
