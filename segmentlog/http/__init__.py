"""A door for people, and programs without a Kafka client: console, REST and schema registry on one port."""
