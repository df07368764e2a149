"""Which machine may ship a store: the local binding, the claim in the manifest, fencing."""
