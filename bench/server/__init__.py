"""The server against Kafka: ``python -m bench.server``.

brokers    either of the two as processes: started, pinned, killed; their processor time and memory
wire       a client of our own on the server's codec: what has to be asked and set up
load       requests that were made beforehand, pipelined over many connections by one thread: the client is no limit
clients    Java's ProducerPerformance and confluent-kafka, in processes of their own
rows       what is compared, and what is made of the rounds
           the rows themselves: `producing`, `consuming`, `latency`, `scaling`, `starting`, `local`
page       docs/bench-server.md, of a results file
"""
