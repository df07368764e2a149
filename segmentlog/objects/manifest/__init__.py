"""The manifest and the objects it refers to: object ranges, checksums, orphans, garbage collection."""
