// A consumer that was assigned partition 0 of a topic, by hand: Follow BOOTSTRAP TOPIC RESET, where RESET is "none" or a policy.
//
// It tells "OFFSET VALUE" of what it reads, and "at POSITION" where it came to with no record. Where it was told that what it has read is gone, it tells
// "truncated POSITION DIVERGES", from which on its history is another one, and goes on there.

import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.List;
import java.util.Properties;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.LogTruncationException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

public class Follow {
    static final PrintStream OUT = System.out;

    public static void main(String[] words) {
        var settings = new Properties();
        settings.put("bootstrap.servers", words[0]);
        settings.put("key.deserializer", ByteArrayDeserializer.class.getName());
        settings.put("value.deserializer", ByteArrayDeserializer.class.getName());
        settings.put("auto.offset.reset", words[2]);
        settings.put("enable.auto.commit", false);
        settings.put("reconnect.backoff.max.ms", 200);
        var partition = new TopicPartition(words[1], 0);
        try (var consumer = new KafkaConsumer<byte[], byte[]>(settings)) {
            consumer.assign(List.of(partition));
            consumer.seek(partition, 0);
            long stood = 0;
            while (true) {
                try {
                    var records = consumer.poll(Duration.ofMillis(100));
                    for (var record : records) {
                        OUT.println(record.offset() + " " + new String(record.value(), StandardCharsets.UTF_8));
                        stood = record.offset() + 1;
                    }
                    if (records.isEmpty() && consumer.position(partition) != stood) {
                        stood = consumer.position(partition);
                        OUT.println("at " + stood);
                    }
                } catch (LogTruncationException error) {
                    var diverges = error.divergentOffsets().get(partition);
                    OUT.println("truncated " + error.offsetOutOfRangePartitions().get(partition) + " " + diverges.offset());
                    consumer.seek(partition, diverges);
                }
                OUT.flush();
            }
        }
    }
}
