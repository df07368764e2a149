"""The coordinator of a cluster: one document that machines replace by conditional swaps."""
