"""What the benches' options take, and a sentence where it is not that."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def existing_folder(text: str) -> Path:
    """Parse the argument of ``--dir``: a folder that can be written to."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder; make it, or name one on the disk to measure")
    if not os.access(path, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written to")
    return path


def one_or_more(text: str) -> int:
    """Return a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)
