"""Object stores: shipping a store there, restoring it, taking it over."""
