"""Isolation levels above read committed: all functions work; with too old a snapshot they fail, and a retry works."""

from typing import Any

import psycopg
import pytest
from clients import connect

LEVELS = ["repeatable read", "serializable"]


@pytest.mark.parametrize("level", LEVELS)
def test_all_verbs_work_at_higher_isolation_levels(database: str, name: str, level: str) -> None:
    with connect(database) as client:
        client.execute(f"set default_transaction_isolation = '{level}'")

        def call(statement: str, *values: Any) -> Any:
            while True:
                try:
                    return client.execute(statement, (name, *values)).fetchone()
                except psycopg.errors.SerializationFailure:
                    continue

        call("select pgqueue.create_queue(%s, archive_for => '1 day')")
        with pytest.raises(psycopg.Error) as caught:
            call("select pgqueue.create_queue(%s)")
        assert caught.value.sqlstate == "PQ002"
        call("select pgqueue.subscribe('levels.' || %s, %s)", name)
        assert call("select pgqueue.publish('levels.' || %s, '0')") == (1,)
        first = call("select pgqueue.enqueue(%s, '1')")
        assert call("select count(*) from pgqueue.enqueue_batch(%s, '{2,3}')") == (2,)
        assert call("select pgqueue.peek(%s)") == (4,)
        assert call("select ready_messages from pgqueue.stats(%s)") == (4,)
        assert call("select payload from pgqueue.receive(%s)") == (0,)
        number, token = call("select id, claim_token from pgqueue.claim(%s)")
        assert (number,) == first
        assert call("select pgqueue.extend(%s, %s, %s, '1 min')", number, token) == (True,)
        number, token = call("select id, claim_token from pgqueue.exchange(%s, array[%s::bigint], %s)", number, token)
        assert call("select pgqueue.nack(%s, %s, %s, '0')", number, token) == (True,)
        numbers = [call("select id from pgqueue.claim(%s)")[0] for _ in range(2)]
        assert call("select pgqueue.purge_queue(%s)") == (2,)
        assert len(set(numbers)) == 2
        assert call("select count(*) from pgqueue.archived_messages where queue_name = %s") == (2,)
        call("select pgqueue.enqueue(%s, '4')")
        epoch = call("select epoch from pgqueue.stream_open(%s, 's')")[0]
        batch, token = call("select seq, claim_token from pgqueue.stream_claim(%s, 's', %s, 0, null, 10)", epoch)
        assert call("select count(*) from pgqueue.stream_read(%s, 's', %s, %s, %s)", epoch, batch, token) == (1,)
        assert call("select pgqueue.stream_ack(%s, 's', %s, %s, %s)", epoch, batch, token) == (1,)
        for verb in ("pause_queue", "resume_queue", "alter_queue", "next_due_at", "prepare_wait", "purge_expired"):
            call(f"select pgqueue.{verb}(%s)")
        call("select pgqueue.expose_transport(%s)")
        assert call("select pgqueue.unexpose_transport(%s)") == (True,)
        assert call("select pgqueue.drop_queue(%s)") == (0,)
        assert call("select count(*) from pgqueue.queues where name = %s") == (0,)
