"""How benches name the build of the interpreter."""

import subprocess
import sys
import sysconfig

import pytest

from bench import interpreter


@pytest.mark.parametrize(
    ("arguments", "prefix", "expected", "is_slow"),
    [
        ("'--enable-optimizations' '--with-lto'", "/home/ann/python", "built with PGO, LTO", False),
        ("'--enable-optimizations'", "/opt/python", "built with PGO", False),
        ("'--prefix=/usr' '--enable-shared'", "/usr", "the distribution's build", False),
        ("'--prefix=/home/ann/.pyenv/versions/3.13.1'", "/home/ann/.pyenv/versions/3.13.1", "built without PGO", True),
        ("", "/usr/local", "built without PGO", True),
    ],
)
def test_the_report_names_the_build(
    arguments: str, prefix: str, expected: str, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bench warns exactly where the interpreter was compiled without profiles."""
    monkeypatch.setattr(sysconfig, "get_config_var", {"CONFIG_ARGS": arguments, "Py_DEBUG": 0}.get)
    monkeypatch.setattr(sys, "base_prefix", prefix)
    assert interpreter.describe_build() == expected
    assert ("without profile-guided" in interpreter.slow_build_warning()) == is_slow


def test_a_bench_warns_once_at_its_start() -> None:
    """`python -m bench.NAME` prints the warning of its interpreter, whichever bench it is."""
    printed = subprocess.run(
        [sys.executable, "-m", "bench.limits", "--help"], capture_output=True, text=True, check=True
    ).stderr
    warning = interpreter.slow_build_warning()
    assert printed.count("warning:") == bool(warning)
    assert warning in printed
