// FlightDelays that dies at the worst of times, as by `kill -9`: DyingFlightDelays PROPERTIES COMMITS.
//
// After so many commits, when flights and positions of the next transaction are with the server, and its end is not.

import java.io.IOException;
import java.util.Map;
import java.util.concurrent.Future;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.kafka.clients.producer.Callback;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.Producer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.streams.processor.internals.DefaultKafkaClientSupplier;

public class DyingFlightDelays {
    public static void main(String[] words) throws IOException {
        var left = new AtomicInteger(Integer.parseInt(words[1]));
        FlightDelays.start(words[0], new DefaultKafkaClientSupplier() {
            @Override
            public Producer<byte[], byte[]> getProducer(Map<String, Object> settings) {
                var bytes = new ByteArraySerializer();
                return new KafkaProducer<byte[], byte[]>(settings, bytes, bytes) {
                    private boolean hasFlown;

                    @Override
                    public Future<RecordMetadata> send(ProducerRecord<byte[], byte[]> record, Callback callback) {
                        hasFlown |= record.topic().equals("flown");
                        return super.send(record, callback);
                    }

                    @Override
                    public void commitTransaction() {
                        if (left.decrementAndGet() < 0 && hasFlown) {
                            flush();
                            Runtime.getRuntime().halt(137);
                        }
                        super.commitTransaction();
                        hasFlown = false;
                    }
                };
            }
        });
    }
}
