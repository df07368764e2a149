// Kafka's command line tools, one after the other in one process, which saves a start of Java for each.
//
// A line of words is a command: what it reads, its main class, its arguments. An answer is its exit status, what it printed,
// and what it printed as errors. All but the status are in the form of driver.py's text_of.

import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.util.Arrays;
import java.util.Base64;
import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;
import org.apache.kafka.common.utils.internals.Exit;

public class Tools {
    static class Ended extends RuntimeException {
    }

    /** Scala's Console, and loggers, hold on to what System.out was at first. */
    static class Switch extends OutputStream {
        ByteArrayOutputStream to = new ByteArrayOutputStream();

        @Override
        public synchronized void write(int one) {
            if (status == null) {
                to.write(one);
            }
        }

        @Override
        public synchronized void write(byte[] data, int at, int count) {
            if (status == null) {
                to.write(data, at, count);
            }
        }

        synchronized String taken() {
            var taken = to;
            to = new ByteArrayOutputStream();
            return "=" + Base64.getEncoder().encodeToString(taken.toByteArray());
        }
    }

    /** Of a command that has ended: what it does then, since it takes its own end for a failure, is not looked at. */
    static volatile Integer status;

    /** What is to be done at the end of a command, such as to send the last records. */
    static final List<Runnable> HOOKS = new CopyOnWriteArrayList<>();

    static void end(int code, String message) {
        if (message != null) {
            System.err.println(message);
        }
        System.out.flush();
        System.err.flush();
        if (status == null) {
            status = code;
        }
        throw new Ended();
    }

    public static void main(String[] words) throws Exception {
        InputStream in = System.in;
        PrintStream answers = System.out;
        var out = new Switch();
        var errors = new Switch();
        System.setOut(new PrintStream(out, true));
        System.setErr(new PrintStream(errors, true));
        Exit.setExitProcedure(Tools::end);
        Exit.setHaltProcedure(Tools::end);
        Exit.setShutdownHookAdder((name, hook) -> HOOKS.add(hook));
        var lines = new BufferedReader(new InputStreamReader(in));
        for (String line; (line = lines.readLine()) != null; ) {
            var command = Arrays.stream(line.split(" ")).map(Tools::textOf).toArray(String[]::new);
            run(command[0], command[1], Arrays.copyOfRange(command, 2, command.length));
            runHooks();
            answers.println(status);
            answers.println(out.taken());
            answers.println(errors.taken());
            answers.println(".");
            answers.flush();
        }
    }

    static void run(String read, String name, String[] words) throws IOException {
        System.setIn(new ByteArrayInputStream(read.getBytes("UTF-8")));
        status = null;
        try {
            Class.forName(name).getMethod("main", String[].class).invoke(null, (Object) words);
            end(0, null);
        } catch (InvocationTargetException failed) {
            if (status == null) {
                failed.getCause().printStackTrace();
                try {
                    end(1, null);
                } catch (Ended ended) {
                    // As Java ends a program that throws.
                }
            }
        } catch (ReflectiveOperationException missing) {
            throw new IllegalArgumentException(missing);
        } catch (Ended ended) {
            // As it is to be.
        }
    }

    static void runHooks() throws InterruptedException {
        for (var hook : HOOKS) {
            var thread = new Thread(hook);
            thread.setDaemon(true);
            thread.start();
            thread.join(10_000);  // some wait for a main program that has ended
        }
        HOOKS.clear();
    }

    static String textOf(String word) {
        return new String(Base64.getDecoder().decode(word.substring(1)));
    }
}
