"""Dependencies of clients in other languages, downloaded once into ``build/clients`` by their package managers."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

_CACHE = Path(__file__).resolve().parents[3] / "build" / "clients"


class Missing(Exception):
    """A client cannot be had on this machine, and why."""


def fetched(name: str, sources: Sequence[Path], make: Callable[[Path], None]) -> Path:
    """Return the folder that ``make`` filled, for these sources; by one process, while others wait."""
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    folder = _CACHE / f"{name}-{digest}"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with open(_CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                make(folder)
            except (subprocess.SubprocessError, OSError) as error:
                said = getattr(error, "stderr", None) or getattr(error, "stdout", None) or error
                raise Missing(f"{name}: its packages could not be fetched: {str(said).strip()[-400:]}") from None
            (folder / ".done").touch()
    return folder
