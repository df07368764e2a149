"""Compact: retain the last records of each key, by copying segments and swapping the copies in."""
