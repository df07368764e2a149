"""The gate of replication: throw-away prototypes of a leader and a follower, beside three Kafka brokers."""
