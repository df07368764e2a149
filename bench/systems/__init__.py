"""The logs that people would pick instead of segmentlog, each behind the same few methods (`bench.systems.base`)."""
