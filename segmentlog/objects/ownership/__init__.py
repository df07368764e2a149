"""Ownership of a shipped store: the local binding, the claim in the manifest, and fencing of other machines."""
