// Claims the messages of a queue on several threads, and acknowledges each in the transaction of its effects.
//
//     JDBC_URL=jdbc:postgresql://… java -cp postgresql.jar Worker.java
//
// A message whose handler fails is delivered again after the queue's backoff, and becomes a dead letter after the last
// attempt. That of a worker that was killed is delivered again when the visibility timeout of the queue ends. SIGTERM and
// Ctrl-C end the worker after the messages that it handles. It connects again when a connection breaks.

import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import java.util.ArrayList;
import java.util.List;
import java.util.UUID;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.TimeUnit;
import org.postgresql.PGConnection;
import org.postgresql.util.PSQLException;
import org.postgresql.util.ServerErrorMessage;

public class Worker implements Runnable {
    static final String QUEUE = "orders";
    static final int CONCURRENCY = 4;

    // One thread for each message that is handled: an extension that waits for its connection delays no other one.
    static final ScheduledExecutorService extensions = Executors.newScheduledThreadPool(CONCURRENCY, runnable -> {
        Thread thread = new Thread(runnable, "extensions");
        thread.setDaemon(true);
        return thread;
    });
    static volatile long extendEvery = 10_000; // ms; a third of the visibility timeout of the queue
    static volatile boolean stopping = false;

    /** A claimed message. Read the payload by your library for JSON. */
    record Message(long id, UUID token, int attempt, String orderId, String card) {}

    /** The message can never succeed: it becomes a dead letter at once. */
    static class Reject extends Exception {
        Reject(String reason) {
            super(reason);
        }
    }

    /** The work for one message, by statements of the connection, whose transaction also acknowledges the message. */
    static void handle(Connection connection, Message message) throws Exception {
        if (message.orderId() == null) {
            throw new Reject("no order_id");
        }
        if ("declined".equals(message.card())) {
            throw new Exception("card declined");
        }
        try (PreparedStatement ship = connection.prepareStatement("insert into shipped (order_id) values (?)")) {
            ship.setLong(1, Long.parseLong(message.orderId()));
            ship.executeUpdate();
        }
    }

    public static void main(String[] arguments) throws InterruptedException {
        List<Thread> threads = new ArrayList<>();
        for (int number = 0; number < CONCURRENCY; number++) {
            threads.add(new Thread(new Worker(), "worker-" + number));
        }
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            stopping = true;
            for (Thread thread : threads) {
                try {
                    thread.join();
                } catch (InterruptedException error) {
                    return;
                }
            }
        }));
        threads.forEach(Thread::start);
    }

    @Override
    public void run() {
        while (!stopping) {
            try (Connection connection = DriverManager.getConnection(System.getenv("JDBC_URL"))) {
                consume(connection);
            } catch (SQLException error) {
                System.err.println(error.getSQLState() + " " + reason(error) + "; tries again");
                pause();
            }
        }
    }

    /** Claim messages until the worker stops. */
    static void consume(Connection connection) throws SQLException {
        try (Statement statement = connection.createStatement()) {
            ResultSet queue = statement.executeQuery(
                "select quote_ident(pgqueue.channel(name)), extract(epoch from visibility_timeout)"
                    + " from pgqueue.get_queue('" + QUEUE + "')");
            queue.next();
            extendEvery = (long) (1000 * queue.getDouble(2) / 3);
            statement.execute("listen " + queue.getString(1));
        }
        Double seconds = null; // how long to wait if the next claim finds nothing
        while (!stopping) {
            Message message = claim(connection);
            if (message != null) {
                work(connection, message);
                seconds = null;
            } else if (seconds == null) {
                // From here on a new message notifies. One that came before is found by the next claim.
                seconds = prepareWait(connection);
            } else {
                await(connection, seconds);
                seconds = null;
            }
        }
    }

    static Message claim(Connection connection) throws SQLException {
        // `->>` returns null for what is not there. A cast that fails here would fail in each claim.
        String call = "select id, claim_token, attempt_count, payload->>'order_id', payload->>'card'"
            + " from pgqueue.claim(?, max_messages => 1, claimed_by => ?)";
        try (PreparedStatement claim = connection.prepareStatement(call)) {
            claim.setString(1, QUEUE);
            claim.setString(2, Thread.currentThread().getName());
            ResultSet row = claim.executeQuery();
            return row.next()
                ? new Message(row.getLong(1), row.getObject(2, UUID.class), row.getInt(3), row.getString(4), row.getString(5))
                : null;
        }
    }

    static double prepareWait(Connection connection) throws SQLException {
        String call = "select extract(epoch from pgqueue.prepare_wait(?) - clock_timestamp())::float8";
        try (PreparedStatement prepare = connection.prepareStatement(call)) {
            prepare.setString(1, QUEUE);
            ResultSet row = prepare.executeQuery();
            row.next();
            return row.getDouble(1);
        }
    }

    /** Wait for a notification, in turns of half a second because a stop cannot interrupt it. */
    static void await(Connection connection, double seconds) throws SQLException {
        PGConnection notified = connection.unwrap(PGConnection.class);
        long until = System.nanoTime() + (long) (1e9 * seconds);
        long left = Math.max((until - System.nanoTime()) / 1_000_000, 1);
        while (!stopping && left > 0) {
            if (notified.getNotifications((int) Math.min(left, 500)).length > 0) {
                return;
            }
            left = (until - System.nanoTime()) / 1_000_000;
        }
    }

    /** Handle a message, and settle it. */
    static void work(Connection connection, Message message) throws SQLException {
        ScheduledFuture<?> extension = extensions.scheduleWithFixedDelay(
            () -> extend(message), extendEvery, extendEvery, TimeUnit.MILLISECONDS);
        try {
            connection.setAutoCommit(false);
            try {
                handle(connection, message);
                if (!settle(connection, "ack(?, ?, ?)", message, null)) {
                    throw new Exception("the claim was lost: another worker has the message");
                }
                connection.commit();
                System.out.println("message " + message.id() + " is done");
            } catch (Exception error) {
                System.err.println("message " + message.id() + ", attempt " + message.attempt() + ": " + reason(error));
                connection.rollback();
                // Without a delay the backoff of the queue applies. If the claim was lost, these return false.
                String verb = error instanceof Reject ? "reject" : "nack";
                settle(connection, verb + "(?, ?, ?, error => ?)", message, reason(error));
                connection.commit();
            }
            connection.setAutoCommit(true);
        } finally {
            extension.cancel(false);
        }
    }

    static boolean settle(Connection connection, String call, Message message, String error) throws SQLException {
        try (PreparedStatement settle = connection.prepareStatement("select pgqueue." + call)) {
            settle.setString(1, QUEUE);
            settle.setLong(2, message.id());
            settle.setObject(3, message.token());
            if (error != null) {
                settle.setString(4, error);
            }
            ResultSet row = settle.executeQuery();
            row.next();
            return row.getBoolean(1);
        }
    }

    static void extend(Message message) {
        try (Connection connection = DriverManager.getConnection(System.getenv("JDBC_URL"))) {
            settle(connection, "extend(?, ?, ?)", message, null);
        } catch (SQLException error) {
            System.err.println("message " + message.id() + " is not extended: " + reason(error));
        }
    }

    /** What an error says, without the functions of the database in which it was raised. */
    static String reason(Exception error) {
        ServerErrorMessage message = error instanceof PSQLException raised ? raised.getServerErrorMessage() : null;
        return message == null ? String.valueOf(error.getMessage()) : message.getMessage();
    }

    static void pause() {
        try {
            Thread.sleep(1000);
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }
}
