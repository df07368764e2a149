// Idempotent producers, one for each NAME, that write NAME:NUMBER until the input ends: Load BOOTSTRAP TOPIC PARTITIONS NAME...
//
// What is acknowledged is told as "PARTITION OFFSET VALUE", what is not as "! why"; "." once all of it is told.

import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Properties;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArraySerializer;

public class Load {
    static final PrintStream OUT = System.out;
    static final int A_TURN = 10;
    static final long PAUSE_MS = 10;
    static volatile boolean isOver = false;

    public static void main(String[] words) throws Exception {
        List<Thread> threads = new ArrayList<>();
        for (int index = 3; index < words.length; index++) {
            String name = words[index];
            threads.add(new Thread(() -> produce(words[0], words[1], Integer.parseInt(words[2]), name)));
        }
        threads.forEach(Thread::start);
        System.in.readAllBytes();
        isOver = true;
        for (var thread : threads) {
            thread.join();
        }
        say(".");
    }

    static void produce(String servers, String topic, int partitions, String name) {
        var settings = new Properties();
        settings.put("bootstrap.servers", servers);
        settings.put("key.serializer", ByteArraySerializer.class.getName());
        settings.put("value.serializer", ByteArraySerializer.class.getName());
        settings.put("enable.idempotence", true);
        settings.put("acks", "all");
        settings.put("linger.ms", 2);
        settings.put("reconnect.backoff.ms", 20);
        settings.put("reconnect.backoff.max.ms", 100);
        settings.put("retry.backoff.ms", 20);
        settings.put("retry.backoff.max.ms", 100);
        settings.put("metadata.max.age.ms", 500);
        try (var producer = new KafkaProducer<byte[], byte[]>(settings)) {
            for (int number = 0; !isOver; number++) {
                String value = name + ":" + number;
                var record = new ProducerRecord<byte[], byte[]>(
                    topic, number % partitions, null, value.getBytes(StandardCharsets.UTF_8)
                );
                producer.send(record, (placed, error) ->
                    say(error == null ? placed.partition() + " " + placed.offset() + " " + value : "! " + value + " " + error));
                if (number % A_TURN == 0) {
                    Thread.sleep(PAUSE_MS);
                }
            }
        } catch (Exception error) {
            say("! " + name + " " + error);
        }
    }

    static synchronized void say(String line) {
        OUT.println(line.replace('\n', ' '));
        OUT.flush();
    }
}
