// A Kafka Streams application that counts words, at least once: Counting BOOTSTRAP APPLICATION INPUT OUTPUT FOLDER.
//
// Words are keys only after a repartition, and counts lie in memory and in a changelog. It tells "WORD COUNT" of each that
// it writes, "restored END OFFSET" of where it read the changelog to, and "! why" of what ends it.

import java.io.PrintStream;
import java.util.Properties;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.processor.StateRestoreListener;
import org.apache.kafka.streams.state.Stores;

public class Counting {
    static final PrintStream OUT = System.out;

    public static void main(String[] words) {
        var settings = new Properties();
        settings.put("bootstrap.servers", words[0]);
        settings.put("application.id", words[1]);
        settings.put("state.dir", words[4]);
        settings.put("processing.guarantee", "at_least_once");
        settings.put("commit.interval.ms", 100);
        settings.put("statestore.cache.max.bytes", 0);
        settings.put("num.stream.threads", 1);
        settings.put("topic.fsync", "never");
        settings.put("main.consumer.session.timeout.ms", 2000);
        settings.put("main.consumer.heartbeat.interval.ms", 300);
        settings.put("reconnect.backoff.max.ms", 200);
        var builder = new StreamsBuilder();
        var strings = Serdes.String();
        builder.stream(words[2], Consumed.with(strings, strings))
            .selectKey((key, word) -> word)
            .groupByKey(Grouped.with(strings, strings))
            .count(Materialized.<String, Long>as(Stores.inMemoryKeyValueStore("counts"))
                .withKeySerde(strings).withValueSerde(Serdes.Long()))
            .toStream()
            .mapValues(count -> count.toString())
            .peek((word, count) -> say(word + " " + count))
            .to(words[3], Produced.with(strings, strings));
        var streams = new KafkaStreams(builder.build(), settings);
        streams.setUncaughtExceptionHandler(error -> {
            say("! " + error);
            return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
        streams.setGlobalStateRestoreListener(new StateRestoreListener() {
            public void onRestoreStart(TopicPartition partition, String store, long start, long end) {
                say("restoring " + start + " " + end);
            }

            public void onBatchRestored(TopicPartition partition, String store, long end, long count) {
            }

            public void onRestoreEnd(TopicPartition partition, String store, long count) {
                say("restored " + count);
            }
        });
        streams.start();
    }

    static synchronized void say(String line) {
        OUT.println(line.replace('\n', ' '));
        OUT.flush();
    }
}
