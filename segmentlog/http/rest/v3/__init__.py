"""Version 3 of the REST Proxy API: administration, and produce record by record."""
