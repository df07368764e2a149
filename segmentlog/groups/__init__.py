"""Consumer groups: who reads what, and committed positions."""
