// The part of Kafka's own test utilities that the SmokeTest of Kafka Streams asks for.

package org.apache.kafka.test;

import java.io.File;
import java.io.IOException;
import java.nio.file.Files;

public class TestUtils {
    public static File tempDirectory() {
        try {
            File made = Files.createTempDirectory("kafka-").toFile();
            made.deleteOnExit();
            return made;
        } catch (IOException failed) {
            throw new IllegalStateException(failed);
        }
    }
}
