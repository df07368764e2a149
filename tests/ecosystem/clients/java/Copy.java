// From topic to topic, exactly once, by Kafka's own client: Copy BOOTSTRAP FROM TO, like confluent_copy.py.

import java.time.Duration;
import java.util.HashMap;
import java.util.List;
import java.util.Properties;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.ProducerFencedException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

public class Copy {
    public static void main(String[] words) {
        var settings = new Properties();
        settings.put("bootstrap.servers", words[0]);
        settings.put("transactional.id", "copy");
        settings.put("group.id", "copy");
        settings.put("key.serializer", ByteArraySerializer.class.getName());
        settings.put("value.serializer", ByteArraySerializer.class.getName());
        settings.put("key.deserializer", ByteArrayDeserializer.class.getName());
        settings.put("value.deserializer", ByteArrayDeserializer.class.getName());
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", false);
        settings.put("isolation.level", "read_committed");
        settings.put("session.timeout.ms", 3000);
        settings.put("heartbeat.interval.ms", 300);
        settings.put("max.poll.records", 50);
        try (var producer = new KafkaProducer<byte[], byte[]>(settings);
                var consumer = new KafkaConsumer<byte[], byte[]>(settings)) {
            producer.initTransactions();
            consumer.subscribe(List.of(words[1]));
            for (int turn = 1; ; turn++) {
                var records = consumer.poll(Duration.ofMillis(200));
                if (records.isEmpty()) {
                    continue;
                }
                producer.beginTransaction();
                try {
                    var behind = new HashMap<TopicPartition, OffsetAndMetadata>();
                    for (var record : records) {
                        producer.send(new ProducerRecord<>(words[2], record.partition(), record.key(), record.value()));
                        var place = new TopicPartition(record.topic(), record.partition());
                        behind.put(place, new OffsetAndMetadata(record.offset() + 1));
                    }
                    producer.sendOffsetsToTransaction(behind, consumer.groupMetadata());
                    if (turn % 5 != 0) {
                        producer.commitTransaction();
                        System.out.println("committed " + records.count());
                        continue;
                    }
                } catch (ProducerFencedException error) {
                    throw error;
                } catch (KafkaException error) {
                    System.err.println(error);
                }
                producer.abortTransaction();
                System.out.println("aborted");
                for (var one : consumer.committed(consumer.assignment()).entrySet()) {
                    consumer.seek(one.getKey(), one.getValue() == null ? 0 : one.getValue().offset());
                }
            }
        }
    }
}
