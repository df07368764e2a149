// How MirrorMaker and the SmokeTest of Kafka Streams end.

package org.apache.kafka.common.utils;

public class Exit {
    public static void exit(int status) {
        org.apache.kafka.common.utils.internals.Exit.exit(status);
    }

    public static void addShutdownHook(String name, Runnable hook) {
        org.apache.kafka.common.utils.internals.Exit.addShutdownHook(name, hook);
    }
}
