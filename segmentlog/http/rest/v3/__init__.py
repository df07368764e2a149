"""Version 3 of the Confluent REST Proxy's API: administration, and records one by one."""
