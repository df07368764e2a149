"""kafkajs, in JavaScript: fetched by npm once."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

from server.clients.fetching import Missing, fetched
from server.clients.program import ProgramDriver

_HERE = Path(__file__).with_name("node")
_PACKAGE = "kafkajs@2.2.4"


class KafkajsDriver(ProgramDriver):
    """kafkajs."""

    name = _PACKAGE.replace("@", " ")
    codecs = ("none", "gzip")  # others are packages of their own
    writes_null_headers = False

    @classmethod
    def command(cls) -> list[str]:
        return node_command(_HERE / "client.js")


@cache
def node_command(program: Path) -> list[str]:
    """Return a command that runs a program with kafkajs. Raises `Missing` if it is not available."""
    missing = [tool for tool in ("node", "npm") if shutil.which(tool) is None]
    if missing:
        raise Missing(f"kafkajs needs {', '.join(missing)}")

    def make(folder: Path) -> None:
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), _PACKAGE]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        shutil.copy(program, folder)  # it looks for packages beside itself

    return ["node", str(fetched(program.parent.name, [program], make) / program.name)]
