"""What people build around Kafka, on our server and on Kafka: transactions, groups, Kafka Streams."""
