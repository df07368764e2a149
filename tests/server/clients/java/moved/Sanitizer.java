// What Debezium's metrics ask for.

package org.apache.kafka.common.utils;

public class Sanitizer {
    public static String jmxSanitize(String name) {
        return org.apache.kafka.common.utils.internals.Sanitizer.jmxSanitize(name);
    }
}
