"""Object stores: upload a store continuously, restore it, read it from there, take it over."""
