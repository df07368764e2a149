// Transactions one after the other: Persist BOOTSTRAP NAME TOPIC. What cannot be committed is aborted, as Kafka says that it
// is to be done, and made again.
//
// It tells "committed N" or "aborted N WHY" of each attempt, "over WHY" when it is the end of the producer.

import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.Properties;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.serialization.ByteArraySerializer;

public class Persist {
    static final PrintStream OUT = System.out;

    public static void main(String[] words) throws InterruptedException {
        var settings = new Properties();
        settings.put("bootstrap.servers", words[0]);
        settings.put("transactional.id", words[1]);
        settings.put("key.serializer", ByteArraySerializer.class.getName());
        settings.put("value.serializer", ByteArraySerializer.class.getName());
        try (var producer = new KafkaProducer<byte[], byte[]>(settings)) {
            producer.initTransactions();
            for (int number = 0; ; ) {
                try {
                    producer.beginTransaction();
                    for (int part = 0; part < 3; part++) {
                        var value = (number + "." + part).getBytes(StandardCharsets.UTF_8);
                        producer.send(new ProducerRecord<>(words[2], 0, null, value));
                        Thread.sleep(20);
                    }
                    producer.commitTransaction();
                    OUT.println("committed " + number++);
                } catch (KafkaException wrong) {
                    try {
                        producer.abortTransaction();
                        OUT.println("aborted " + number + " " + wrong.getClass().getSimpleName());
                    } catch (KafkaException end) {
                        OUT.println("over " + wrong + " " + end);
                        return;
                    }
                }
            }
        }
    }
}
