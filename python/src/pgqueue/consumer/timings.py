"""The durations of a consumer that are no settings. Each is read at the moment of use, so that a test can change it."""

from dataclasses import dataclass


@dataclass(slots=True)
class Timings:
    """Durations in seconds."""

    # Claims
    extend_after: float = 1 / 3  # of the visibility timeout, after which a claim is extended
    extension_check: float = 1.0  # between two looks for claims to extend, at most
    ack_batch: float = 0.01  # for which acknowledgements wait, to be sent together
    longest_lock_timeout: float = 0.5  # of a statement that locks messages; all other statements wait as well
    shortest_lock_timeout: float = 0.02  # the same if a message is known to be locked
    lock_search: float = 1.0  # for finding out which messages are locked
    record: float = 30.0  # for which a call of receive mode waits until its failure is recorded, at most
    settle_locked_again: float = 0.5  # until the settlement of a locked message is tried again

    # Handlers
    late_after: float = 10  # visibility timeouts, after which a handler without a time limit is reported
    cancel: float = 0.5  # for a thread to notice that its call is cancelled, before its connection is aborted
    end_calls: float = 2.5  # for all cancelled calls to end
    cancel_statement: float = 10.0  # for telling the server that the statement of an aborted connection is cancelled
    abort: float = 0.05  # for the server and for other threads to notice that a connection was aborted

    # Looking for messages
    shortest_wait: float = 0.1  # before the first of several looks for the same message
    gather: float = 0.005  # for more handlers to end before the next claim, where more messages are ready
    quiet: float = 0.02  # without a notification, after which a consumer asks when the next message is due
    registration: float = 20.0  # for which senders notify after a consumer has begun to wait
    probe: float = 5.0  # for the notification that shows that LISTEN works
    longest_listen_pause: float = 30.0  # before another connection is opened to listen
    liveness: float = 5.0  # between two touches of the liveness file
    settings_read: float = 60.0  # between two readings of the settings of the queues
    settings_read_missing: float = 5.0  # the same while one of the queues does not exist

    # Failures
    deadline: float = 30.0  # of a statement
    least_deadline: float = 10.0  # the same where the visibility timeout is short
    shortest_pause: float = 0.01  # after any failure
    first_pause: float = 0.05  # after the first failure; each of the next pauses is twice as long
    armed_pause: float = 1.0  # the longest while the circuit is armed
    open_pause: float = 10.0  # while the circuit is open
    conflict_pause: float = 0.005  # after the first conflict of a transaction, at most; it grows by as much with each
    longest_conflict_pause: float = 0.1  # after many conflicts, at most

    # The end
    poll_end: float = 5.0  # for the last look or claim
    forced_poll_end: float = 0.5  # the same in a forced stop
    last_settlements: float = 5.0  # for sending what is not settled or given back yet
    end_retry: float = 0.1  # between two tries to settle or to give back messages


timings = Timings()
