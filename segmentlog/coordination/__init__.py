"""Coordination of a cluster: one document in an object store, etcd or ZooKeeper, replaced by conditional swaps."""
