"""Keeping the last records of each key: copy what stays, swap it in."""
