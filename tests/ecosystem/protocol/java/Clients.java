// The clients of a game: what they are told of a network that is cut, and where nobody waits for long.

import java.time.Duration;
import java.util.Properties;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

class Clients {
    static Properties network() {
        var settings = new Properties();
        settings.put("bootstrap.servers", Players.bootstrap);
        settings.put("reconnect.backoff.ms", 10);
        settings.put("reconnect.backoff.max.ms", 100);
        settings.put("retry.backoff.ms", 20);
        settings.put("retry.backoff.max.ms", 100);
        settings.put("request.timeout.ms", 5000);
        settings.put("metadata.max.age.ms", 300);
        settings.put("enable.metrics.push", false);
        return settings;
    }

    static KafkaProducer<String, String> producer(String name) {
        var settings = network();
        settings.put("linger.ms", 0);
        settings.put("max.block.ms", 2000);
        settings.put("delivery.timeout.ms", 20000);
        settings.put("key.serializer", StringSerializer.class.getName());
        settings.put("value.serializer", StringSerializer.class.getName());
        if (name != null) {
            settings.put("transactional.id", name);
            settings.put("transaction.timeout.ms", Players.timeoutMs);
        }
        return new KafkaProducer<>(settings);
    }

    static KafkaConsumer<String, String> consumer(String group, String protocol) {
        var settings = network();
        settings.put("group.id", group);
        settings.put("group.protocol", protocol);
        if (protocol.equals("classic")) {
            settings.put("session.timeout.ms", Players.sessionMs);
            settings.put("heartbeat.interval.ms", Players.sessionMs / 5);
            settings.put("partition.assignment.strategy", Players.strategy);
        }
        settings.put("enable.auto.commit", false);
        settings.put("auto.offset.reset", "earliest");
        settings.put("isolation.level", "read_committed");
        settings.put("fetch.max.wait.ms", 100);
        settings.put("max.poll.records", 50);
        settings.put("default.api.timeout.ms", 5000);
        settings.put("key.deserializer", StringDeserializer.class.getName());
        settings.put("value.deserializer", StringDeserializer.class.getName());
        return new KafkaConsumer<>(settings);
    }

    // A producer that is not waited for long: what it has open is aborted by its successor.
    record Closing(KafkaProducer<String, String> inner) implements AutoCloseable {
        public void close() {
            inner.close(Duration.ofMillis(500));
        }
    }
}
