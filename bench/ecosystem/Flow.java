// A Kafka Streams application, exactly once: Flow BOOTSTRAP APPLICATION INPUT OUTPUT RECORDS FOLDER.
//
// It counts by key, with a repartition and a changelog. It prints "ready" once it runs, and then, when it has seen so many
// records behind the repartition and all of them are committed, "done SECONDS": since it took the first one from INPUT.

import java.io.PrintStream;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.state.Stores;

public class Flow {
    static final PrintStream OUT = System.out;

    public static void main(String[] words) throws Exception {
        long wanted = Long.parseLong(words[4]);
        var settings = new Properties();
        settings.put("bootstrap.servers", words[0]);
        settings.put("application.id", words[1]);
        settings.put("state.dir", Path.of(words[5]).toString());
        settings.put("processing.guarantee", "exactly_once_v2");
        settings.put("statestore.cache.max.bytes", 0);
        settings.put("num.stream.threads", 1);
        settings.put("auto.offset.reset", "earliest");
        var began = new AtomicLong();
        var seen = new AtomicLong();
        var all = new CountDownLatch(1);
        var failed = new boolean[1];
        var strings = Serdes.String();
        var builder = new StreamsBuilder();
        builder.stream(words[2], Consumed.with(strings, strings))
            .peek((key, value) -> began.compareAndSet(0, System.nanoTime()))
            .selectKey((key, value) -> value.substring(0, 4))
            .groupByKey(Grouped.with(strings, strings))
            .count(Materialized.<String, Long>as(Stores.inMemoryKeyValueStore("counts"))
                .withKeySerde(strings).withValueSerde(Serdes.Long()))
            .toStream()
            .mapValues(count -> count.toString())
            .peek((key, count) -> {
                if (seen.incrementAndGet() == wanted) {
                    all.countDown();
                }
            })
            .to(words[3], Produced.with(strings, strings));
        var streams = new KafkaStreams(builder.build(), settings);
        streams.setUncaughtExceptionHandler(error -> {
            error.printStackTrace();
            failed[0] = true;
            all.countDown();
            return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
        streams.setStateListener((now, before) -> {
            if (now == KafkaStreams.State.RUNNING) {
                OUT.println("ready");
            }
        });
        streams.start();
        all.await();
        streams.close(Duration.ofSeconds(60)); // which commits
        if (failed[0]) {
            System.exit(1);
        }
        OUT.println("done " + (System.nanoTime() - began.get()) / 1e9);
    }
}
