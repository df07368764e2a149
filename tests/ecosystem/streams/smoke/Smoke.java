// The "run" of Kafka's StreamsSmokeTest, of any size: Smoke BOOTSTRAP KEYS RECORDS SECONDS writes so many records for each key in so
// many seconds, and tells whether what the processors made of them is right. StreamsSmokeTest itself has 20 keys, 1000 and 90.

import java.time.Duration;
import org.apache.kafka.streams.tests.SmokeTestDriver;

public class Smoke {
    public static void main(String[] words) {
        int keys = Integer.parseInt(words[1]), records = Integer.parseInt(words[2]);
        var written = SmokeTestDriver.generate(words[0], keys, records, Duration.ofSeconds(Long.parseLong(words[3])));
        System.out.println("ALL-RECORDS-WRITTEN");
        var found = SmokeTestDriver.verify(words[0], written, records, true);
        // The driver asks first where a topic ends, then how far it is committed: while the processors still write, that may be further.
        while (!found.passed() && found.result().contains("is larger than topic endOffset")) {
            System.out.println("again: " + found.result());
            found = SmokeTestDriver.verify(words[0], written, records, true);
        }
        System.out.println(found.result());
        System.out.println(found.passed() ? "PASSED" : "NOT-PASSED");
    }
}
