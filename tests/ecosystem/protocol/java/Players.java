// Kafka's own clients as players of a game: Players BOOTSTRAP LABEL JOURNAL SIZES SESSION_MS TIMEOUT_MS GROUP STRATEGY SEED.
//
// A plain producer, transactions, a reader and, once it is told so, a member of a group write into the journal what they do,
// as delivery_checker.py tells it. On stdin come "classic" and "consumer": be a member by that protocol; "off": be none;
// "end".

import java.io.BufferedReader;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.InvalidPidMappingException;
import org.apache.kafka.common.errors.InvalidProducerEpochException;
import org.apache.kafka.common.errors.ProducerFencedException;
import org.apache.kafka.common.errors.TimeoutException;

public class Players {
    static final Pattern SIZE = Pattern.compile("\"([^\"]+)\": (\\d+)");
    static final String TARGET = "out";
    static final int TARGETS = 2;
    static String bootstrap, label, group, strategy;
    static int sessionMs, timeoutMs;
    static Path sizes;
    static FileOutputStream journal;
    static volatile boolean isOver;
    static volatile String protocol = "off";

    interface Work {
        void run() throws Exception;
    }

    public static void main(String[] words) throws Exception {
        bootstrap = words[0];
        label = words[1];
        journal = new FileOutputStream(words[2], true);
        sizes = Path.of(words[3]);
        sessionMs = Integer.parseInt(words[4]);
        timeoutMs = Integer.parseInt(words[5]);
        group = words[6];
        strategy = words[7];
        long seed = Long.parseLong(words[8]);
        var players = List.of(
            new Player("plain", seed), new Player("transactions", seed + 1), new Player("pipeline", seed + 2),
            new Player("reader", seed + 3));
        var threads = new ArrayList<Thread>();
        for (var player : players) {
            threads.add(new Thread(player::play, player.name));
            threads.get(threads.size() - 1).start();
        }
        var orders = new BufferedReader(new InputStreamReader(System.in));
        for (String order; (order = orders.readLine()) != null && !order.equals("end"); ) {
            protocol = order;
        }
        isOver = true;
        protocol = "off";
        for (var thread : threads) {
            thread.join();
        }
    }

    static class Player {
        final String job;
        String name;
        final Random random;
        int number;

        Player(String job, long seed) {
            this.job = job;
            this.name = label + job;
            this.random = new Random(seed);
        }

        // ------------------------------------------------------------ telling

        void say(String kind, String rest) {
            var line = "[\"" + kind + "\", \"" + name + "\"" + (rest.isEmpty() ? "" : ", " + rest) + "]\n";
            try {
                journal.write(line.getBytes(StandardCharsets.UTF_8));
            } catch (IOException error) {
                throw new java.io.UncheckedIOException(error);
            }
        }

        static String quoted(String text) {
            return "\"" + text.replace("\\", "\\\\").replace("\"", "\\\"").replace("\n", " ") + "\"";
        }

        static String listed(List<String> values) {
            return "[" + String.join(", ", values.stream().map(Player::quoted).toList()) + "]";
        }

        void play() {
            try {
                while (!isOver) {
                    try {
                        switch (job) {
                            case "plain" -> plain();
                            case "transactions" -> transactions();
                            case "pipeline" -> pipeline();
                            default -> reader();
                        }
                    } catch (KafkaException error) {
                        say("*met", quoted(error.toString()));
                        Thread.sleep(20);
                    }
                }
            } catch (Throwable error) {
                var text = new java.io.StringWriter();
                error.printStackTrace(new java.io.PrintWriter(text));
                say("error", quoted(text.toString()));
            }
        }

        String value() {
            return name + "-" + ++number + (random.nextInt(3) == 0 ? ".".repeat(100) : "");
        }

        static Map<String, Integer> sizes() throws IOException {
            var found = new LinkedHashMap<String, Integer>();
            Matcher matcher = SIZE.matcher(Files.readString(sizes));
            while (matcher.find()) {
                found.put(matcher.group(1), Integer.parseInt(matcher.group(2)));
            }
            return found;
        }

        TopicPartition place() throws IOException {
            var sizes = sizes();
            sizes.remove(TARGET);
            var topic = new ArrayList<>(sizes.keySet()).get(random.nextInt(sizes.size()));
            return new TopicPartition(topic, random.nextInt(sizes.get(topic)));
        }

        void pause() throws InterruptedException {
            Thread.sleep(new int[] {20, 50, 100}[random.nextInt(3)]);
        }

        // ------------------------------------------------------------ producing

        void plain() throws Exception {
            var hasFailed = new AtomicBoolean();
            var flying = new AtomicInteger();
            try (var producer = Clients.producer(null)) {
                while (!isOver && !hasFailed.get()) {
                    if (flying.get() < 40) {
                        var where = place();
                        var values = new ArrayList<String>();
                        for (int left = random.nextInt(3); left >= 0; left--) {
                            values.add(value());
                        }
                        say("send", "\"\", " + quoted(where.topic()) + ", " + where.partition() + ", " + listed(values));
                        for (var value : values) {
                            flying.incrementAndGet();
                            var record = new ProducerRecord<String, String>(where.topic(), where.partition(), null, value);
                            producer.send(record, (placed, error) -> {
                                flying.decrementAndGet();
                                if (error == null) {
                                    say("acked", quoted(where.topic()) + ", " + where.partition() + ", [["
                                        + placed.offset() + ", " + quoted(value) + "]]");
                                } else if (hasFailed.compareAndSet(false, true)) {
                                    say("*failed", quoted(error.toString()));
                                }
                            });
                        }
                    }
                    pause();
                }
            }
        }

        // ------------------------------------------------------------ transactions

        void transactions() throws Exception {
            try (var producer = new Clients.Closing(Clients.producer("java"))) {
                initialize(producer.inner());
                while (!isOver) {
                    var txn = name + "/" + ++number;
                    producer.inner().beginTransaction();
                    boolean isKept = number % 4 != 0;
                    if (!attempt(producer.inner(), txn, isKept, () -> {
                        for (int left = random.nextInt(4); left >= 0; left--) {
                            var where = place();
                            send(producer.inner(), txn, where, List.of(value(), value()));
                        }
                        if (!isKept) {
                            producer.inner().flush();
                            Thread.sleep(150);
                        }
                    })) {
                        return;
                    }
                    pause();
                }
            }
        }

        void initialize(KafkaProducer<String, String> producer) {
            while (true) {
                try {
                    producer.initTransactions();
                    return;
                } catch (TimeoutException error) {
                    if (isOver) {
                        throw error;
                    }
                }
            }
        }

        // Whether all of it was done, and ended as it was meant to.
        boolean attempt(KafkaProducer<String, String> producer, String txn, boolean isKept, Work work) throws Exception {
            try {
                work.run();
                say(isKept ? "commit" : "abort", quoted(txn));
                end(producer, isKept);
                say(isKept ? "committed" : "aborted", quoted(txn));
                return true;
            } catch (TimeoutException | ProducerFencedException | InvalidProducerEpochException
                    | InvalidPidMappingException error) {
                say("*met", quoted(error.toString()));
                return false;
            } catch (KafkaException error) {
                say("*aborts", quoted(error.toString()));
                end(producer, false);
                say("aborted", quoted(txn));
                return false;
            }
        }

        void end(KafkaProducer<String, String> producer, boolean isKept) {
            while (true) {
                try {
                    if (isKept) {
                        producer.commitTransaction();
                    } else {
                        producer.abortTransaction();
                    }
                    return;
                } catch (TimeoutException error) {
                    if (isOver) {
                        throw error;
                    }
                }
            }
        }

        void send(KafkaProducer<String, String> producer, String txn, TopicPartition where, List<String> values) {
            say("send", quoted(txn) + ", " + quoted(where.topic()) + ", " + where.partition() + ", " + listed(values));
            for (var value : values) {
                producer.send(new ProducerRecord<>(where.topic(), where.partition(), null, value));
            }
        }

        // ------------------------------------------------------------ exactly once

        void pipeline() throws Exception {
            var wanted = protocol;
            if (wanted.equals("off")) {
                Thread.sleep(10);
                return;
            }
            try (var producer = new Clients.Closing(Clients.producer("pipe-java"))) {
                initialize(producer.inner());
                var consumer = Clients.consumer(group, wanted);
                try {
                    var telling = new Telling(consumer);
                    consumer.subscribe(List.of("in"), telling);
                    while (protocol.equals(wanted) && transform(consumer, producer.inner())) {
                        if (consumer.groupMetadata().generationId() != telling.known) {
                            telling.own(consumer.assignment());
                        }
                    }
                } finally {
                    consumer.close(Duration.ofSeconds(2));
                }
            }
        }

        class Telling implements ConsumerRebalanceListener {
            final KafkaConsumer<String, String> consumer;
            int known = -1;

            Telling(KafkaConsumer<String, String> consumer) {
                this.consumer = consumer;
            }

            // What is assigned to it now: when it comes, and again in each generation in which it stays.
            void own(Collection<TopicPartition> partitions) {
                var membership = consumer.groupMetadata();
                known = membership.generationId();
                for (var one : partitions) {
                    if (known >= 0) {
                        say("owns", System.nanoTime() + ", " + quoted(membership.memberId()) + ", " + known + ", "
                            + quoted(one.topic()) + ", " + one.partition());
                    }
                }
            }

            public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
                own(partitions);
            }

            public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
            }
        }

        boolean transform(KafkaConsumer<String, String> consumer, KafkaProducer<String, String> producer)
                throws Exception {
            var records = consumer.poll(Duration.ofMillis(50));
            if (records.isEmpty()) {
                return true;
            }
            var membership = consumer.groupMetadata();
            if (membership.generationId() < 0 || membership.memberId().isEmpty()) {
                return false; // it was given up, and does not know it yet: its positions would count as nobody's
            }
            var txn = name + "/" + ++number;
            var isKept = random.nextInt(10) != 0;
            var behind = new HashMap<TopicPartition, OffsetAndMetadata>();
            producer.beginTransaction();
            if (!attempt(producer, txn, isKept, () -> {
                for (var where : records.partitions()) {
                    var values = new ArrayList<String>();
                    for (ConsumerRecord<String, String> one : records.records(where)) {
                        values.add("o:" + one.partition() + ":" + one.offset() + ":" + one.value());
                        behind.put(where, new OffsetAndMetadata(one.offset() + 1));
                    }
                    send(producer, txn, new TopicPartition(TARGET, where.partition() % TARGETS), values);
                }
                producer.sendOffsetsToTransaction(behind, membership);
            })) {
                return false;
            }
            for (var where : isKept ? Set.<TopicPartition>of() : records.partitions()) {
                if (consumer.assignment().contains(where)) {
                    consumer.seek(where, records.records(where).get(0).offset());
                }
            }
            return true;
        }

        // ------------------------------------------------------------ reading

        void reader() throws Exception {
            Set<TopicPartition> assigned = new HashSet<>();
            name = label + job + ++number; // another one, from the beginning
            try (var consumer = Clients.consumer(name, "consumer")) {
                while (!isOver) {
                    var wanted = new HashSet<TopicPartition>();
                    sizes().forEach((topic, count) -> {
                        for (int partition = 0; partition < count; partition++) {
                            wanted.add(new TopicPartition(topic, partition));
                        }
                    });
                    if (!wanted.equals(assigned)) {
                        consumer.assign(wanted);
                        wanted.removeAll(assigned);
                        consumer.seekToBeginning(wanted);
                        assigned.addAll(wanted);
                    }
                    var records = consumer.poll(Duration.ofMillis(50));
                    for (var where : records.partitions()) {
                        var found = new ArrayList<String>();
                        for (var one : records.records(where)) {
                            found.add("[" + one.offset() + ", " + quoted(one.value()) + "]");
                        }
                        say("handed", "\"read_committed\", " + quoted(where.topic()) + ", " + where.partition() + ", ["
                            + String.join(", ", found) + "]");
                    }
                }
            }
        }
    }
}
