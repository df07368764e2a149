// A database, asked line by line: Sql URL. Each line is a statement; the answer is its rows, a line each with tabs between
// the columns, and a line with a dot, or one with an exclamation mark and the reason why not.

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.SQLException;
import java.util.ArrayList;

public class Sql {
    public static void main(String[] words) throws Exception {
        var lines = new BufferedReader(new InputStreamReader(System.in));
        try (var connection = connected(words[0]); var statement = connection.createStatement()) {
            for (String line; (line = lines.readLine()) != null; ) {
                try {
                    if (statement.execute(line)) {
                        var rows = statement.getResultSet();
                        int columns = rows.getMetaData().getColumnCount();
                        while (rows.next()) {
                            var fields = new ArrayList<String>();
                            for (int column = 1; column <= columns; column++) {
                                fields.add(String.valueOf(rows.getString(column)));
                            }
                            System.out.println(String.join("\t", fields));
                        }
                    }
                    System.out.println(".");
                } catch (SQLException error) {
                    System.out.println("! " + error.getMessage().replace('\n', ' '));
                }
                System.out.flush();
            }
        }
    }

    static Connection connected(String url) throws Exception {
        for (int attempt = 1; ; attempt++) {
            try {
                return DriverManager.getConnection(url);
            } catch (SQLException error) { // it is still starting
                if (attempt == 300) {
                    throw error;
                }
                Thread.sleep(100);
            }
        }
    }
}
