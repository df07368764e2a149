// The thread in which the SmokeTest of Kafka Streams closes its application.

package org.apache.kafka.common.utils;

public class KafkaThread extends Thread {
    private KafkaThread(String name, Runnable work) {
        super(work, name);
    }

    public static KafkaThread nonDaemon(String name, Runnable work) {
        return new KafkaThread(name, work);
    }
}
