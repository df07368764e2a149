"""A door for people and for programs without a Kafka client: the console, REST and the schema registry on one HTTP port."""
