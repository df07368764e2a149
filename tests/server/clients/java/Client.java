// Kafka's own clients behind the commands that program.py tells of.

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.TreeMap;
import java.util.concurrent.Future;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.stream.Collectors;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.CommitFailedException;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.RebalanceInProgressException;
import org.apache.kafka.common.errors.StaleMemberEpochException;
import org.apache.kafka.common.errors.UnknownMemberIdException;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

public class Client {
    static final PrintStream OUT = System.out;
    static final Duration SOON = Duration.ofMillis(200);
    static final long PATIENCE_MS = 30_000;

    public static void main(String[] words) throws Exception {
        if (words.length > 0) {
            member(words[1], words[2], words[3]);
        }
        var in = new BufferedReader(new InputStreamReader(System.in));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            try {
                for (String answer : answer(line.split(" "))) {
                    OUT.println(answer);
                }
                OUT.println(".");
            } catch (Exception error) {
                OUT.println("! " + error.toString().replace('\n', ' '));
            }
            OUT.flush();
        }
    }

    static List<String> answer(String[] words) throws Exception {
        String servers = words[1];
        switch (words[0]) {
            case "create":
                return create(servers, words);
            case "write":
                return write(servers, words);
            case "read":
                return read(servers, words[2], words[4].equals("1"));
            case "consume":
                return consume(servers, words[2], words[3], Integer.parseInt(words[4]));
            case "time":
                return time(servers, partition(words), Long.parseLong(words[4]));
            case "lag":
                return lag(servers, words[2], words[3]);
            case "trim":
                return trim(servers, partition(words), Long.parseLong(words[4]));
            case "delete":
                return withAdmin(servers, admin -> admin.deleteTopics(List.of(words[2])).all().get());
            case "delete_group":
                return withAdmin(servers, admin -> admin.deleteConsumerGroups(List.of(words[2])).all().get());
            default:
                throw new IllegalArgumentException(words[0]);
        }
    }

    static TopicPartition partition(String[] words) {
        return new TopicPartition(words[2], Integer.parseInt(words[3]));
    }

    // ------------------------------------------------------------ writing

    static List<String> create(String servers, String[] words) throws Exception {
        Map<String, String> config = new HashMap<>();
        for (int index = 4; index < words.length; index++) {
            String[] pair = words[index].split("=", 2);
            config.put(pair[0], pair[1]);
        }
        var topic = new NewTopic(words[2], Integer.parseInt(words[3]), (short) 1).configs(config);
        return withAdmin(servers, admin -> admin.createTopics(List.of(topic)).all().get());
    }

    static List<String> write(String servers, String[] words) throws Exception {
        var settings = settings(servers);
        settings.put("key.serializer", ByteArraySerializer.class.getName());
        settings.put("value.serializer", ByteArraySerializer.class.getName());
        settings.put("compression.type", words[3]);
        settings.put("acks", words[4]);
        settings.put("enable.idempotence", words[5].equals("1"));
        settings.put("linger.ms", 20);
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        try (var producer = new KafkaProducer<byte[], byte[]>(settings)) {
            for (int index = 6; index < words.length; index++) {
                String[] parts = words[index].split(":", -1);
                List<Header> headers = new ArrayList<>();
                for (String header : parts[4].isEmpty() ? new String[0] : parts[4].split(",")) {
                    String[] pair = header.split(";");
                    headers.add(new RecordHeader(pair[0], bytes(pair[1])));
                }
                sent.add(producer.send(new ProducerRecord<>(
                    words[2], Integer.valueOf(parts[0]), Long.valueOf(parts[1]), bytes(parts[2]), bytes(parts[3]), headers
                )));
            }
        }
        List<String> placed = new ArrayList<>();
        for (var future : sent) {
            placed.add(future.get().partition() + ":" + (future.get().hasOffset() ? future.get().offset() : -1));
        }
        return placed;
    }

    // ------------------------------------------------------------ reading

    static List<String> read(String servers, String topic, boolean committed) {
        var settings = reading(servers);
        settings.put("isolation.level", committed ? "read_committed" : "read_uncommitted");
        List<String> found = new ArrayList<>();
        try (var consumer = new KafkaConsumer<byte[], byte[]>(settings)) {
            List<TopicPartition> all = new ArrayList<>();
            consumer.partitionsFor(topic).forEach(info -> all.add(new TopicPartition(topic, info.partition())));
            consumer.assign(all);
            consumer.seekToBeginning(all);
            var ends = consumer.endOffsets(all);
            long until = System.currentTimeMillis() + PATIENCE_MS;
            while (all.stream().anyMatch(one -> consumer.position(one) < ends.get(one))) {
                consumer.poll(SOON).forEach(record -> found.add(text(record)));
                check(until, found.size());
            }
        }
        return found;
    }

    static List<String> consume(String servers, String group, String topic, int count) {
        var settings = reading(servers);
        settings.put("group.id", group);
        settings.put("max.poll.records", count);
        List<String> found = new ArrayList<>();
        try (var consumer = new KafkaConsumer<byte[], byte[]>(settings)) {
            Map<TopicPartition, OffsetAndMetadata> read = new HashMap<>();
            var mustRewind = new AtomicBoolean(); // there was a rebalance, or a commit was refused
            consumer.subscribe(List.of(topic), new AtRebalance(mustRewind));
            long until = System.currentTimeMillis() + PATIENCE_MS;
            while (true) {
                check(until, found.size());
                var records = consumer.poll(SOON);
                if (mustRewind.getAndSet(false)) {
                    found.clear();
                    read.clear();
                    rewind(consumer);
                    continue;
                }
                for (var record : records) {
                    if (found.size() < count) {
                        found.add(text(record));
                        read.put(
                            new TopicPartition(record.topic(), record.partition()),
                            new OffsetAndMetadata(record.offset() + 1)
                        );
                    }
                }
                if (found.size() == count) {
                    if (isCommitted(consumer, read)) {
                        return found;
                    }
                    mustRewind.set(true);
                }
            }
        }
    }

    static void member(String servers, String group, String topic) {
        var settings = reading(servers);
        settings.put("group.id", group);
        try (var consumer = new KafkaConsumer<byte[], byte[]>(settings)) {
            consumer.subscribe(List.of(topic));
            while (true) {
                var records = consumer.poll(SOON);
                if (records.isEmpty()) {
                    continue;
                }
                if (!isCommitted(consumer, records.nextOffsets())) {
                    rewind(consumer);
                    continue;
                }
                for (var record : records) {
                    OUT.println(record.partition() + " " + record.offset() + " " + text(record.value()));
                }
                OUT.flush();
            }
        }
    }

    record AtRebalance(AtomicBoolean flag) implements ConsumerRebalanceListener {
        public void onPartitionsRevoked(Collection<TopicPartition> revoked) {
            flag.set(true);
        }

        public void onPartitionsAssigned(Collection<TopicPartition> assigned) {
            flag.set(true);
        }
    }

    /** Seek to the committed offsets, so that the consumer reads again what it has read and not committed. */
    static void rewind(KafkaConsumer<byte[], byte[]> consumer) {
        Map<TopicPartition, OffsetAndMetadata> committed;
        try {
            committed = consumer.committed(consumer.assignment());
        } catch (UnknownMemberIdException | StaleMemberEpochException error) {
            return; // the consumer is not a member any more, and loses all partitions
        }
        committed.forEach((kept, position) -> {
            try {
                if (position == null) {
                    consumer.seekToBeginning(List.of(kept));
                } else {
                    consumer.seek(kept, position);
                }
            } catch (IllegalStateException error) {
                // The consumer has lost this partition in the meantime.
            }
        });
    }

    /** False: there is a rebalance, or there was one. */
    static boolean isCommitted(KafkaConsumer<byte[], byte[]> consumer, Map<TopicPartition, OffsetAndMetadata> read) {
        try {
            consumer.commitSync(read);
            return true;
        } catch (CommitFailedException | RebalanceInProgressException error) {
            return false;
        }
    }

    static List<String> time(String servers, TopicPartition wanted, long timestamp) {
        try (var consumer = new KafkaConsumer<byte[], byte[]>(reading(servers))) {
            var found = consumer.offsetsForTimes(Map.of(wanted, timestamp)).get(wanted);
            return List.of(found == null ? "-1" : Long.toString(found.offset()));
        }
    }

    // ------------------------------------------------------------ administration

    static List<String> lag(String servers, String group, String topic) throws Exception {
        try (var admin = Admin.create(settings(servers))) {
            var committed = admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata().get();
            var ends = admin.listOffsets(committed.keySet().stream()
                .collect(Collectors.toMap(one -> one, one -> OffsetSpec.latest()))).all().get();
            Map<Integer, Long> lag = new TreeMap<>();
            ends.forEach((one, end) -> {
                if (one.topic().equals(topic)) {
                    lag.put(one.partition(), end.offset() - committed.get(one).offset());
                }
            });
            return lag.entrySet().stream().map(entry -> entry.getKey() + ":" + entry.getValue()).toList();
        }
    }

    static List<String> trim(String servers, TopicPartition wanted, long offset) throws Exception {
        return withAdmin(servers, admin ->
            admin.deleteRecords(Map.of(wanted, RecordsToDelete.beforeOffset(offset))).all().get());
    }

    interface Work {
        void on(Admin admin) throws Exception;
    }

    static List<String> withAdmin(String servers, Work work) throws Exception {
        try (var admin = Admin.create(settings(servers))) {
            work.on(admin);
        }
        return List.of();
    }

    // ------------------------------------------------------------ settings and words

    static Properties settings(String servers) {
        var settings = new Properties();
        settings.put("bootstrap.servers", servers);
        return settings;
    }

    static Properties reading(String servers) {
        var settings = settings(servers);
        settings.put("key.deserializer", ByteArrayDeserializer.class.getName());
        settings.put("value.deserializer", ByteArrayDeserializer.class.getName());
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", false);
        if (System.getProperty("group.protocol", "classic").equals("consumer")) {
            settings.put("group.protocol", "consumer"); // whose times are the server's
        } else {
            settings.put("session.timeout.ms", 1000);
            settings.put("heartbeat.interval.ms", 200);
        }
        return settings;
    }

    static void check(long until, int count) {
        if (System.currentTimeMillis() > until) {
            throw new IllegalStateException("only " + count + " records came in time");
        }
    }

    static String text(ConsumerRecord<byte[], byte[]> record) {
        List<String> headers = new ArrayList<>();
        record.headers().forEach(header -> headers.add(header.key() + ";" + text(header.value())));
        return record.partition() + ":" + record.offset() + ":" + record.timestamp() + ":" + text(record.key()) + ":"
            + text(record.value()) + ":" + String.join(",", headers);
    }

    static String text(byte[] data) {
        return data == null ? "-" : "=" + Base64.getEncoder().encodeToString(data);
    }

    static byte[] bytes(String text) {
        return text.equals("-") ? null : Base64.getDecoder().decode(text.substring(1));
    }
}
