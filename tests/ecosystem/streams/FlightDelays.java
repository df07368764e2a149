// Delays by carrier and day, and flights with their planes, as Kafka Streams computes them: FlightDelays PROPERTIES.
//
//     flights   tail number -> the flight, as JSON          planes   tail number -> the plane, as JSON
//     delays    "CARRIER DAY" -> "FLIGHTS SUM MAX", anew with each flight of that day that has left
//     flown     tail number -> "CARRIER FLIGHT MANUFACTURER SEATS", once for each flight whose plane is known
//
// It tells "state NAME" of what it comes to, "restored STORE PARTITION COUNT" of each changelog that it has read, and
// "! WHY" of what ends it.

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.time.LocalDate;
import java.time.ZoneOffset;
import java.util.Properties;
import java.util.Set;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaClientSupplier;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.KeyValue;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.TopologyConfig;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Named;
import org.apache.kafka.streams.kstream.TimeWindows;
import org.apache.kafka.streams.kstream.Windowed;
import org.apache.kafka.streams.processor.StateRestoreListener;
import org.apache.kafka.streams.processor.internals.DefaultKafkaClientSupplier;

public class FlightDelays {
    static final ObjectMapper JSON = new ObjectMapper();

    public static void main(String[] words) throws IOException {
        start(words[0], new DefaultKafkaClientSupplier());
    }

    static void start(String properties, KafkaClientSupplier clients) throws IOException {
        var settings = new Properties();
        try (var reader = Files.newBufferedReader(Path.of(properties))) {
            settings.load(reader);
        }
        settings.put("default.key.serde", Serdes.StringSerde.class);
        settings.put("default.value.serde", Serdes.StringSerde.class);
        var streams = new KafkaStreams(topology(settings), settings, clients);
        streams.setStateListener((state, before) -> say("state " + state));
        streams.setUncaughtExceptionHandler(error -> {
            say("! " + error);
            return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
        streams.setGlobalStateRestoreListener(new Restoring());
        Runtime.getRuntime().addShutdownHook(new Thread(() -> streams.close(Duration.ofSeconds(10))));
        streams.start();
    }

    static Topology topology(Properties settings) {
        // Where stores lie, in memory or on disk, is among the settings.
        var builder = new StreamsBuilder(new TopologyConfig(new StreamsConfig(settings)));
        var flights = builder.<String, String>stream("flights").mapValues(FlightDelays::parsed);
        var planes = builder.<String, String>table("planes", Materialized.as("planes"));
        flights
            .filter((tail, flight) -> tail != null)
            .join(planes, (flight, plane) -> flown(flight, parsed(plane)))
            .to("flown");
        // So long that nothing is ever too late: what an application was killed at comes again behind all others.
        var days = TimeWindows.ofSizeAndGrace(Duration.ofDays(1), Duration.ofDays(366));
        flights
            .filter((tail, flight) -> !Set.of("", "NA").contains(flight.get("dep_delay").asText()))
            .map((tail, flight) -> KeyValue.pair(flight.get("carrier").asText(), flight.get("dep_delay").asText()))
            .groupByKey(Grouped.as("carriers"))
            .windowedBy(days)
            .aggregate(() -> "", FlightDelays::added, Materialized.as("delays"))
            .toStream((day, sums) -> nameOf(day), Named.as("by-day"))
            .to("delays");
        return builder.build();
    }

    static JsonNode parsed(String value) {
        try {
            return JSON.readTree(value);
        } catch (JsonProcessingException error) {
            throw new IllegalArgumentException(value, error);
        }
    }

    static String flown(JsonNode flight, JsonNode plane) {
        return flight.get("carrier").asText() + " " + flight.get("flight").asText() + " "
            + plane.get("manufacturer").asText() + " " + plane.get("seats").asText();
    }

    static String added(String carrier, String minutes, String sums) {
        long delay = Long.parseLong(minutes);
        if (sums.isEmpty()) {
            return "1 " + delay + " " + delay;
        }
        var parts = sums.split(" ");
        return (Long.parseLong(parts[0]) + 1) + " " + (Long.parseLong(parts[1]) + delay) + " "
            + Math.max(Long.parseLong(parts[2]), delay);
    }

    static String nameOf(Windowed<String> day) {
        return day.key() + " " + LocalDate.ofInstant(day.window().startTime(), ZoneOffset.UTC);
    }

    static class Restoring implements StateRestoreListener {
        public void onRestoreStart(TopicPartition partition, String store, long start, long end) {
            say("restoring " + store + " " + partition.partition() + " " + (end - start));
        }

        public void onBatchRestored(TopicPartition partition, String store, long end, long count) {
        }

        public void onRestoreEnd(TopicPartition partition, String store, long count) {
            say("restored " + store + " " + partition.partition() + " " + count);
        }
    }

    static synchronized void say(String line) {
        System.out.println(line.replace('\n', ' '));
        System.out.flush();
    }
}
