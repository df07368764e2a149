"""Files, memory maps and locks: the only layer that calls ``os`` and ``mmap``."""
