"""The only floor that touches ``os`` and ``mmap``: files, maps, locks, and what lies in them."""
