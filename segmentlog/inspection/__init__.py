"""Looking at a store that may be broken, without mending it: verify, dump, scrub."""
