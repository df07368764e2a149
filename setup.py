"""Compile the loops over records where there are a C compiler and Python's headers. Elsewhere install without.

Metadata is in setup.cfg. Where a compiler is missing or fails, the install succeeds, and Python interprets the source.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CORE = Path("segmentlog", "speedups")


class BuildExtension(build_ext):
    """Compiles the core, and never leaves an older library beside a newer source."""

    def run(self) -> None:
        """Delete the library of this Python, then compile. Python interprets the source where that fails."""
        if self.inplace:
            for old in CORE.glob("*" + sysconfig.get_config_var("EXT_SUFFIX")):
                old.unlink()
        super().run()


def extensions() -> list[Extension]:
    """Return the core; an empty list where a build without isolation has no Cython."""
    try:
        from Cython.Build import cythonize
    except ImportError:
        sys.stderr.write("segmentlog: Cython is not installed; the core is not compiled and runs more slowly\n")
        return []
    core = Extension(
        "segmentlog.speedups.records",
        [str(CORE / "records.py")],
        depends=[str(CORE / "records.pxd")],
        # -O2, which is Python's own choice, takes 1.5 times as long to check records and twice as long to encode them.
        extra_compile_args=["-O3", "-g0"],
    )
    # annotation_typing: C types come from the .pxd alone. The annotations are for readers and mypy.
    directives = {"language_level": 3, "annotation_typing": False, "wraparound": False}
    found: list[Extension] = cythonize([core], build_dir="build/cython", compiler_directives=directives, quiet=True)
    for one in found:
        one.optional = True  # cythonize makes a new extension, and drops this
    return found


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExtension})
