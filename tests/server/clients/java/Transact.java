// From topic to topic, exactly once: Transact BOOTSTRAP NAME FROM TO COUNT. Every other attempt is aborted and made again.
//
// It tells "committed POSITION" of each transaction, and ends when so many records were read.

import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

public class Transact {
    static final PrintStream OUT = System.out;

    public static void main(String[] words) {
        var settings = new Properties();
        settings.put("bootstrap.servers", words[0]);
        settings.put("transactional.id", words[1]);
        settings.put("group.id", words[1]);
        settings.put("key.serializer", ByteArraySerializer.class.getName());
        settings.put("value.serializer", ByteArraySerializer.class.getName());
        settings.put("key.deserializer", ByteArrayDeserializer.class.getName());
        settings.put("value.deserializer", ByteArrayDeserializer.class.getName());
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", false);
        settings.put("isolation.level", "read_committed");
        settings.put("max.poll.records", 5);
        var partition = new TopicPartition(words[2], 0);
        long count = Long.parseLong(words[4]), done = 0;
        try (var consumer = new KafkaConsumer<byte[], byte[]>(settings);
                var producer = new KafkaProducer<byte[], byte[]>(settings)) {
            producer.initTransactions();
            consumer.subscribe(List.of(words[2]));
            for (int attempt = 0; done < count; ) {
                var records = consumer.poll(Duration.ofMillis(200));
                if (records.isEmpty()) {
                    continue;
                }
                producer.beginTransaction();
                for (var record : records) {
                    var value = new String(record.value(), StandardCharsets.UTF_8) + "!";
                    producer.send(new ProducerRecord<>(words[3], value.getBytes(StandardCharsets.UTF_8)));
                }
                var position = new OffsetAndMetadata(consumer.position(partition));
                producer.sendOffsetsToTransaction(Map.of(partition, position), consumer.groupMetadata());
                if (attempt++ % 2 == 0) {
                    producer.abortTransaction();
                    consumer.seek(partition, done);
                } else {
                    producer.commitTransaction();
                    done = position.offset();
                    OUT.println("committed " + done);
                }
            }
        }
    }
}
