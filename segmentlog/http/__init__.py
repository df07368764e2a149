"""HTTP server: console, REST API and schema registry on one port, for browsers and programs without a Kafka client."""
