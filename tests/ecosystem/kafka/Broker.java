// Kafka, one broker that is its own controller: Broker PROPERTIES. Its folder is formatted where that is to be done.

import org.apache.kafka.common.utils.internals.Exit;

public class Broker {
    static class Ended extends RuntimeException {
    }

    public static void main(String[] words) {
        Exit.setExitProcedure((status, message) -> {
            if (status == 0) {
                throw new Ended();
            }
            Runtime.getRuntime().halt(status);
        });
        try {
            kafka.tools.StorageTool.main(new String[] {
                "format", "--ignore-formatted", "--cluster-id", "AAAAAAAAAAAAAAAAAAAAAQ", "--config", words[0]
            });
        } catch (Ended ended) {
            // A second program in the same process: a start of Java is saved.
        }
        Exit.resetExitProcedure();
        kafka.Kafka.main(words);
    }
}
