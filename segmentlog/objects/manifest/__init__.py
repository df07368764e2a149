"""The manifest and the objects it refers to: byte ranges, checksums, orphans, garbage collection."""
