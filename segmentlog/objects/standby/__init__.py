"""A standby: a machine that keeps a replica of a shipped store, and takes the store over when its owner is gone."""
