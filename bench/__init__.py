"""Benchmarks: how far segmentlog is from what this machine's C code can do with the same bytes."""

import os
import sys

from bench.interpreter import slow_build_warning

_WARNED = "SEGMENTLOG_BENCH_WARNED"
# Set for the processes that a bench starts.

# While Python looks for the module of `python -m bench.NAME`, argv[0] is "-m". Tests import bench without this.
if sys.argv[0] == "-m" and _WARNED not in os.environ and (_warning := slow_build_warning()):
    os.environ[_WARNED] = "1"
    print(_warning, file=sys.stderr)
