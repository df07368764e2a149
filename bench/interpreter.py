"""How this Python was built: whether its compiler optimised it with profiles, which decides every figure of ours.

A CPython that was compiled without profile-guided optimisation (PGO) runs Python code about a third slower than the
one that Linux distributions ship: a single append took 25.9 us in place of 20.3. C libraries are as fast in both, so
the ratios to them are wrong as well.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

DISTRIBUTIONS_PYTHON = "/usr/bin/python3"
_PACKAGED_PREFIX = "/usr"


def describe_build() -> str:
    """Return how this interpreter was built, in a few words for a report."""
    if not has_pgo():
        return "built without PGO"
    source = "the distribution's build" if _is_packaged() else "built with PGO"
    return f"{source}, LTO" if "--with-lto" in _configure_arguments() else source


def has_pgo() -> bool:
    """Tell whether this interpreter was compiled with profile-guided optimisation.

    ``configure --enable-optimizations`` leaves its mark in ``sysconfig``. Debian, Ubuntu and others call
    ``make profile-opt`` in its place, which leaves none: a distribution's interpreter counts as optimised.
    """
    return "--enable-optimizations" in _configure_arguments() or _is_packaged()


def slow_build_warning() -> str:
    """Return what to say where figures of this interpreter are not those of users; empty where it is optimised."""
    if has_pgo():
        return ""
    lines = (
        f"warning: {os.path.realpath(sys.executable)} was built without profile-guided optimisation (PGO): Python code"
        " runs about a third slower than in a distribution's Python, and the ratios to C code are worse by as much."
    )
    if Path(DISTRIBUTIONS_PYTHON).exists():
        return f"{lines} `make bench` uses {DISTRIBUTIONS_PYTHON}."
    return f"{lines} Measure with another one: make bench BENCH_PYTHON=/path/to/python3"


def _configure_arguments() -> str:
    return str(sysconfig.get_config_var("CONFIG_ARGS") or "")


def _is_packaged() -> bool:
    """Tell whether the interpreter comes from a package of the system: no one else installs into /usr itself."""
    return sys.base_prefix == _PACKAGED_PREFIX and not sysconfig.get_config_var("Py_DEBUG")
