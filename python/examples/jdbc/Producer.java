// Takes an order and sends its message in one transaction: both are committed, or neither.
//
//     JDBC_URL=jdbc:postgresql://… java -cp postgresql.jar Producer.java ORDER_ID [CARD]

import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;

public class Producer {
    public static void main(String[] arguments) throws SQLException {
        long orderId = Long.parseLong(arguments[0]);
        // A program with many fields writes JSON by a library, such as Jackson.
        String payload = arguments.length == 1
            ? "{\"order_id\": %d}".formatted(orderId)
            : "{\"order_id\": %d, \"card\": \"%s\"}".formatted(orderId, arguments[1]);
        try (Connection connection = DriverManager.getConnection(System.getenv("JDBC_URL"))) {
            connection.setAutoCommit(false);
            try (PreparedStatement insert = connection.prepareStatement("insert into orders (order_id) values (?)")) {
                insert.setLong(1, orderId);
                insert.executeUpdate();
            }
            // JDBC sends a String as varchar, which PostgreSQL does not convert to other types without a cast.
            String enqueue = "select pgqueue.enqueue(?, ?::jsonb, headers => ?::jsonb, dedup_key => ?)";
            try (PreparedStatement send = connection.prepareStatement(enqueue)) {
                send.setString(1, "orders");
                send.setString(2, payload);
                send.setString(3, "{\"event\": \"created\"}");
                send.setString(4, "order-" + orderId);
                ResultSet sent = send.executeQuery();
                sent.next();
                System.out.println("sent " + sent.getLong(1));
            }
            connection.commit();
        }
    }
}
