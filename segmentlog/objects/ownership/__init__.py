"""Which machine may ship a store: the binding, the claim, fencing."""
