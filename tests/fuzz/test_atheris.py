"""The coverage-guided fuzzer, for a few seconds: that it runs, and that it finds nothing it would find at once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from seeds import fresh_seed

SECONDS = int(os.environ.get("SEGMENTLOG_FUZZ_SECONDS", "8"))

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris is not installed (its wheels are for some Pythons only)",
)


def test_atheris_finds_nothing(tmp_path: Path) -> None:
    """Every decoder is fuzzed for SEGMENTLOG_FUZZ_SECONDS, starting with valid batches, checkpoints and documents."""
    script = Path(__file__).with_name("atheris_decoders.py")
    done = subprocess.run(
        [sys.executable, str(script), f"-max_total_time={SECONDS}", f"-seed={fresh_seed()}",
         "-rss_limit_mb=2048", "-timeout=20", "-max_len=4096", f"-artifact_prefix={tmp_path}/"],
        capture_output=True, text=True, timeout=SECONDS + 60, check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    assert "Done" in done.stderr
