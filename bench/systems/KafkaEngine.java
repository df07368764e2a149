import java.io.BufferedInputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.EOFException;
import java.io.File;
import java.io.IOException;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Comparator;
import java.util.List;
import java.util.Optional;
import java.util.Properties;
import java.util.Random;
import java.util.concurrent.CountDownLatch;
import java.util.stream.Stream;

import org.apache.kafka.common.compress.Compression;
import org.apache.kafka.common.record.TimestampType;
import org.apache.kafka.common.record.internal.FileRecords;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.MemoryRecordsBuilder;
import org.apache.kafka.common.record.internal.Record;
import org.apache.kafka.common.record.internal.RecordBatch;
import org.apache.kafka.common.utils.Time;
import org.apache.kafka.common.utils.Utils;
import org.apache.kafka.common.utils.internals.BufferSupplier;
import org.apache.kafka.common.utils.internals.CloseableIterator;
import org.apache.kafka.server.storage.log.FetchIsolation;
import org.apache.kafka.server.util.KafkaScheduler;
import org.apache.kafka.storage.internals.log.Cleaner;
import org.apache.kafka.storage.internals.log.LogConfig;
import org.apache.kafka.storage.internals.log.LogDirFailureChannel;
import org.apache.kafka.storage.internals.log.LogToClean;
import org.apache.kafka.storage.internals.log.ProducerStateManagerConfig;
import org.apache.kafka.storage.internals.log.SkimpyOffsetMap;
import org.apache.kafka.storage.internals.log.UnifiedLog;
import org.apache.kafka.storage.internals.utils.Throttler;
import org.apache.kafka.storage.log.metrics.BrokerTopicStats;

/**
 * Kafka's log (UnifiedLog) in a folder, without a broker around it: driven by lines on stdin, answered on stdout.
 *
 * <pre>
 * open FOLDER FSYNC KEYED   ok                       FSYNC: never, second, batch; KEYED: true, false
 * pool COUNT, then records  ok                       what the appends go round in
 * put COUNT, then records   ok                       append these, as one batch
 * append SECONDS BATCH MOST records seconds times    batches of the pool, with the microseconds of each
 * threads COUNT SECONDS     records seconds times    single records, so many threads at once
 * scan values|records       records seconds
 * reads COUNT SEED          count seconds times      single records at random offsets
 * read OFFSET               length, then the value
 * end | compact | close     log end offset | ok | ok
 *
 * a record in a request: i32 length of the key (-1: none), key, i32 length of the value, value; big-endian
 * </pre>
 *
 * A command that fails is answered by "error" and what went wrong. "append", "scan" and "reads" are timed here, as
 * the JVM is the program that is measured: what goes over the pipe are figures.
 */
public final class KafkaEngine {
    private static final String PARTITION = "log-0";
    private static final int FETCH_BYTES = 1 << 20;
    private static final int SEGMENT_BYTES = 1 << 30;
    private static final int BATCH_BYTES = 1 << 16;
    private static final double WARM_UP_SECONDS = 2;
    private static final int COMPACTION_MAP_BYTES = 128 << 20;

    private final DataInputStream in = new DataInputStream(new BufferedInputStream(System.in, 1 << 16));
    private final DataOutputStream out;
    private List<Row> pool = List.of();
    private boolean keyed;
    private Log log;

    private record Row(byte[] key, byte[] value) { }

    private KafkaEngine(PrintStream out) {
        this.out = new DataOutputStream(out);
    }

    public static void main(String[] arguments) throws IOException {
        PrintStream answers = System.out;
        System.setOut(System.err);  // whatever a library prints must not look like an answer
        new KafkaEngine(answers).serve();
    }

    private void serve() throws IOException {
        for (String line = readLine(); line != null; line = readLine()) {
            String[] words = line.split(" ");
            try {
                answer(words);
            } catch (Exception | AssertionError error) {
                error.printStackTrace();
                say("error " + error.toString().replace('\n', ' '));
            }
            out.flush();
            if (words[0].equals("close")) {
                return;
            }
        }
    }

    private void answer(String[] words) throws Exception {
        switch (words[0]) {
            case "open" -> {
                keyed = Boolean.parseBoolean(words[3]);
                log = new Log(Path.of(words[1]), words[2]);
                say("ok");
            }
            case "pool" -> {
                pool = readRows(Integer.parseInt(words[1]));
                say("ok");
            }
            case "put" -> {
                log.append(readRows(Integer.parseInt(words[1])));
                say("ok");
            }
            case "append" -> say(append(Double.parseDouble(words[1]), Integer.parseInt(words[2]),
                                        Long.parseLong(words[3])));
            case "threads" -> say(appendFromThreads(Integer.parseInt(words[1]), Double.parseDouble(words[2])));
            case "scan" -> say(scan(words[1].equals("records")));
            case "reads" -> say(readRandomly(Integer.parseInt(words[1]), Long.parseLong(words[2])));
            case "read" -> {
                byte[] value = log.read(Long.parseLong(words[1]));
                say(Integer.toString(value.length));
                out.write(value);
            }
            case "end" -> say(Long.toString(log.end()));
            case "compact" -> {
                log.compact();
                say("ok");
            }
            case "close" -> {
                if (log != null) {
                    log.close();
                }
                say("ok");
            }
            default -> throw new IllegalArgumentException("no such command: " + words[0]);
        }
    }

    // ---------------------------------------------------------------- what is timed

    private String append(double seconds, int batchRecords, long most) throws Exception {
        List<List<Row>> batches = batches(batchRecords);
        warmUp(scratch -> {
            for (List<Row> batch : batches) {
                scratch.append(batch);
            }
        });
        Times times = new Times();
        long done = 0;
        long started = System.nanoTime();
        long now = started;
        for (int number = 0; done < most && (done == 0 || now - started < seconds * 1e9); number++) {
            List<Row> batch = batches.get(number % batches.size());
            if (batch.size() > most - done) {
                batch = batch.subList(0, (int) (most - done));
            }
            long before = now;
            log.append(batch);
            now = System.nanoTime();
            times.add(now - before);
            done += batch.size();
        }
        return figures(done, now - started) + " " + times;
    }

    private String appendFromThreads(int count, double seconds) throws Exception {
        List<Row> one = batches(1).get(0);
        warmUp(scratch -> scratch.append(one));
        Times[] times = new Times[count];
        List<Throwable> failures = new ArrayList<>();
        CountDownLatch start = new CountDownLatch(1);
        List<Thread> threads = new ArrayList<>();
        long[] started = new long[1];
        for (int number = 0; number < count; number++) {
            Times own = times[number] = new Times();
            threads.add(new Thread(() -> {
                try {
                    start.await();
                    for (long now = System.nanoTime(); now - started[0] < seconds * 1e9; ) {
                        log.append(one);
                        long after = System.nanoTime();
                        own.add(after - now);
                        now = after;
                    }
                } catch (Throwable error) {
                    synchronized (failures) {
                        failures.add(error);
                    }
                }
            }));
        }
        threads.forEach(Thread::start);
        started[0] = System.nanoTime();
        start.countDown();
        for (Thread thread : threads) {
            thread.join();
        }
        long elapsed = System.nanoTime() - started[0];
        if (!failures.isEmpty()) {
            throw new IllegalStateException(failures.get(0));
        }
        Times all = new Times();
        for (Times own : times) {
            all.addAll(own);
        }
        return figures(all.count, elapsed) + " " + all;
    }

    private String scan(boolean full) throws Exception {
        warmUp(() -> log.scan(full));
        long started = System.nanoTime();
        long count = log.scan(full);
        return figures(count, System.nanoTime() - started);
    }

    private String readRandomly(int count, long seed) throws Exception {
        Random random = new Random(seed);
        long end = log.end();
        warmUp(() -> log.read(random.nextLong(end)));
        Times times = new Times();
        long started = System.nanoTime();
        for (int number = 0; number < count; number++) {
            long offset = random.nextLong(end);
            long before = System.nanoTime();
            log.read(offset);
            times.add(System.nanoTime() - before);
        }
        return figures(count, System.nanoTime() - started) + " " + times;
    }

    private interface Work {
        void run() throws Exception;
    }

    private interface WorkOn {
        void run(Log scratch) throws Exception;
    }

    /** Run it until the compiler has seen it often: a program that runs for days is compiled, too. */
    private static void warmUp(Work work) throws Exception {
        long until = System.nanoTime() + (long) (WARM_UP_SECONDS * 1e9);
        do {
            work.run();
        } while (System.nanoTime() < until);
    }

    /** The same with a log that is thrown away, and is never fsynced: the log that is measured gets nothing of it. */
    private void warmUp(WorkOn work) throws Exception {
        Path folder = Files.createTempDirectory(log.folder, "warm-up-");
        try {
            Log scratch = new Log(folder, "never");
            warmUp(() -> work.run(scratch));
            scratch.close();
        } finally {
            try (Stream<Path> paths = Files.walk(folder)) {
                paths.sorted(Comparator.reverseOrder()).map(Path::toFile).forEach(File::delete);
            }
        }
    }

    /** The pool cut into, or joined to, batches of that size. */
    private List<List<Row>> batches(int batchRecords) {
        if (pool.isEmpty()) {
            throw new IllegalStateException("give a pool of records first");
        }
        List<Row> rows = new ArrayList<>(pool);
        while (rows.size() < batchRecords) {
            rows.addAll(pool);
        }
        List<List<Row>> batches = new ArrayList<>();
        for (int at = 0; at + batchRecords <= rows.size(); at += batchRecords) {
            batches.add(rows.subList(at, at + batchRecords));
        }
        return batches;
    }

    // ---------------------------------------------------------------- the log

    /** One partition, set up as kafka.log.LogManager sets one up, with the defaults of a broker. */
    private final class Log {
        final Path folder;
        private final String fsync;
        private final UnifiedLog log;
        private final KafkaScheduler scheduler = new KafkaScheduler(1);
        private final Compression lz4 = Compression.lz4().build();
        private final ThreadLocal<ByteBuffer> buffer = ThreadLocal.withInitial(() -> ByteBuffer.allocate(BATCH_BYTES));
        private final ThreadLocal<BufferSupplier> decompression = ThreadLocal.withInitial(BufferSupplier::create);

        Log(Path folder, String fsync) throws IOException {
            this.folder = folder;
            this.fsync = fsync;
            Path partition = folder.resolve(PARTITION);
            Files.createDirectories(partition);
            // Without its mark of a clean shutdown, which a broker leaves and takes away, the log is recovered:
            // it is left by close(), and taken away here.
            boolean wasClosed = Files.deleteIfExists(cleanShutdownMark());
            Properties settings = new Properties();
            settings.put("segment.bytes", Integer.toString(SEGMENT_BYTES));
            settings.put("retention.ms", "-1");
            settings.put("file.delete.delay.ms", "0");
            if (fsync.equals("batch")) {
                settings.put("flush.messages", "1");
            }
            scheduler.startup();
            // Its recovery point is 0, as a broker's checkpoint of it may be when it is killed: all of the last
            // segment is read and checked.
            log = UnifiedLog.create(
                partition.toFile(), new LogConfig(settings), 0, 0, scheduler, new BrokerTopicStats(), Time.SYSTEM,
                Integer.MAX_VALUE, new ProducerStateManagerConfig(86_400_000, false), 600_000,
                new LogDirFailureChannel(1), wasClosed, Optional.empty());
            log.updateHighWatermark(log.logEndOffset());
            if (fsync.equals("second")) {
                scheduler.schedule("flush", () -> log.flush(false), 1000, 1000);
            }
        }

        /** Encode, as a producer does, and append, as a leader does; with "batch" it fsyncs before it returns. */
        void append(List<Row> rows) throws IOException {
            ByteBuffer bytes = buffer.get();
            bytes.clear();
            long now = System.currentTimeMillis();
            MemoryRecordsBuilder builder =
                MemoryRecords.builder(bytes, lz4, TimestampType.CREATE_TIME, 0);
            for (Row row : rows) {
                builder.append(now, keyed ? row.key : null, row.value);
            }
            MemoryRecords records = builder.build();
            if (builder.buffer().capacity() > bytes.capacity()) {
                buffer.set(builder.buffer());  // it has grown
            }
            log.appendAsLeader(records, 0);
        }

        /** As Kafka's consumer does it: fetch a megabyte, check each batch, take each record's bytes out of it. */
        long scan(boolean full) throws IOException {
            long count = 0;
            long bytes = 0;
            long offset = log.logStartOffset();
            long end = log.logEndOffset();
            while (offset < end) {
                for (RecordBatch batch : fetch(offset, FETCH_BYTES).batches()) {
                    batch.ensureValid();
                    try (CloseableIterator<Record> records = batch.streamingIterator(decompression.get())) {
                        while (records.hasNext()) {
                            Record record = records.next();
                            bytes += Utils.toArray(record.value()).length;
                            if (full) {
                                bytes += record.offset() + record.timestamp() + Utils.toArray(record.key()).length;
                            }
                            count++;
                        }
                    }
                    offset = batch.nextOffset();
                }
            }
            if (bytes == 0 && count > 0) {  // asked, so that the compiler cannot leave the work out
                throw new IllegalStateException("records without a byte");
            }
            return count;
        }

        byte[] read(long offset) throws IOException {
            for (RecordBatch batch : fetch(offset, 1).batches()) {
                batch.ensureValid();
                try (CloseableIterator<Record> records = batch.streamingIterator(decompression.get())) {
                    while (records.hasNext()) {
                        Record record = records.next();
                        if (record.offset() == offset) {
                            return Utils.toArray(record.value());
                        }
                    }
                }
            }
            throw new IllegalStateException("there is no offset " + offset);
        }

        /** At least the batch that holds that offset, in memory. */
        private MemoryRecords fetch(long offset, int bytes) throws IOException {
            FileRecords found = (FileRecords) log.read(offset, bytes, FetchIsolation.LOG_END, true).records;
            ByteBuffer fetched = ByteBuffer.allocate(found.sizeInBytes());
            found.readInto(fetched, 0);
            return MemoryRecords.readableRecords(fetched);
        }

        long end() {
            return log.logEndOffset();
        }

        /** One pass of the log cleaner over everything, with the buffers that a broker gives it. */
        void compact() throws Exception {
            log.roll();
            log.updateHighWatermark(log.logEndOffset());
            Throttler unthrottled = new Throttler(Double.MAX_VALUE, 300, "cleaner-io", "bytes", Time.SYSTEM);
            Cleaner cleaner = new Cleaner(0, new SkimpyOffsetMap(COMPACTION_MAP_BYTES), 512 << 10, 1 << 20, 0.9,
                                          unthrottled, Time.SYSTEM, partition -> { });
            cleaner.clean(new LogToClean(log, log.logStartOffset(), log.activeSegment().baseOffset(), true));
            while (hasDeleted()) {  // segments that were replaced are deleted by another thread
                Thread.sleep(1);
            }
        }

        void close() throws Exception {
            log.flush(true);
            log.close();
            scheduler.shutdown();
            Files.write(cleanShutdownMark(), new byte[0]);
        }

        private boolean hasDeleted() throws IOException {
            try (Stream<Path> files = Files.list(folder.resolve(PARTITION))) {
                return files.anyMatch(path -> path.toString().endsWith(".deleted"));
            }
        }

        private Path cleanShutdownMark() {
            return folder.resolve("closed");
        }
    }

    // ---------------------------------------------------------------- lines and figures

    /** Nanoseconds, said as microseconds between commas. */
    private static final class Times {
        private long[] nanos = new long[1 << 12];
        private int count;

        void add(long time) {
            if (count == nanos.length) {
                nanos = Arrays.copyOf(nanos, 2 * count);
            }
            nanos[count++] = time;
        }

        void addAll(Times others) {
            for (int at = 0; at < others.count; at++) {
                add(others.nanos[at]);
            }
        }

        @Override
        public String toString() {
            StringBuilder said = new StringBuilder(8 * count);
            for (int at = 0; at < count; at++) {
                said.append(at == 0 ? "" : ",").append(nanos[at] / 1000).append('.').append(nanos[at] % 1000 / 100);
            }
            return said.toString();
        }
    }

    private static String figures(long records, long nanos) {
        return records + " " + nanos / 1e9;
    }

    private void say(String line) throws IOException {
        out.write((line + "\n").getBytes(StandardCharsets.UTF_8));
    }

    private String readLine() throws IOException {
        StringBuilder line = new StringBuilder();
        for (int read = in.read(); read != '\n'; read = in.read()) {
            if (read < 0) {
                return null;
            }
            line.append((char) read);
        }
        return line.toString();
    }

    private List<Row> readRows(int count) throws IOException {
        List<Row> rows = new ArrayList<>(count);
        for (int number = 0; number < count; number++) {
            byte[] key = readBytes();
            rows.add(new Row(key, readBytes()));
        }
        return rows;
    }

    private byte[] readBytes() throws IOException {
        int length = in.readInt();
        if (length < 0) {
            return null;
        }
        byte[] bytes = in.readNBytes(length);
        if (bytes.length < length) {
            throw new EOFException("a record is cut short");
        }
        return bytes;
    }
}
