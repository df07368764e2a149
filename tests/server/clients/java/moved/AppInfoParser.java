// What connectors say is their version.

package org.apache.kafka.common.utils;

public class AppInfoParser {
    public static String getVersion() {
        return org.apache.kafka.common.utils.internals.AppInfoParser.getVersion();
    }
}
