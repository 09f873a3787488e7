"""Streams through the clients: reads, replays, fencing, errors, and sessions killed during each call."""

from typing import Any

import pytest

import pgqueue


def test_a_stream_is_read_batch_by_batch(queue: Any) -> None:
    ids = queue.enqueue_batch([{"n": n} for n in range(10)])
    stream = queue.stream_open("s", opened_by="test")
    assert (
        stream.acked_seq,
        stream.acked_token,
        stream.messages,
        stream.opened_by,
    ) == (0, None, None, "test")
    assert stream.last_id >= ids[-1]
    (batch,) = queue.stream_claim("s", stream.epoch, 0, None, max_messages=6, partitions=2)
    assert (batch.seq, batch.messages, batch.partitions, batch.lost) == (1, 6, 2, [])
    assert queue.stream_begin("s", stream.epoch, 1, batch.claim_token).messages == 6
    halves = [queue.stream_read("s", stream.epoch, 1, batch.claim_token, partition) for partition in (0, 1)]
    assert [[message.id for message in half] for half in halves] == [ids[:3], ids[3:6]]
    assert halves[1][2].payload == {"n": 5}
    (kept,) = queue.stream_extend("s", stream.epoch)
    assert kept.claimed_until > batch.claimed_until

    again = queue.stream_open("s")
    assert (again.claim_token, again.messages) == (batch.claim_token, 6)
    with pytest.raises(pgqueue.StreamFenced):
        queue.stream_extend("s", stream.epoch)
    (adopted,) = queue.stream_claim("s", again.epoch, 0, None)
    assert (adopted.seq, adopted.claim_token) == (1, batch.claim_token)
    assert queue.stream_skip("s", 1, [ids[0]], "bad", again.epoch) == 1
    assert [letter.last_error for letter in queue.browse_dead_messages()] == ["bad"]
    (following,) = queue.stream_claim("s", again.epoch, 1, batch.claim_token)
    assert (following.seq, following.messages) == (2, 4)
    with pytest.raises(pgqueue.StreamOutOfStep):
        queue.stream_begin("s", again.epoch, 1, batch.claim_token)
    assert queue.stream_begin("s", again.epoch, 1, batch.claim_token, fail_on_data_loss=False).partitions == 0
    assert queue.stream_ack("s", again.epoch, 2, following.claim_token) == 4
    assert queue.stream_claim("s", again.epoch, 2, following.claim_token) == []
    (listed,) = queue.list_streams()
    assert (listed.acked_seq, listed.claim_token) == (2, None)
    assert queue.drop_stream("s") == 0
    with pytest.raises(pgqueue.StreamNotFound):
        queue.drop_stream("s")


def test_errors_name_lost_and_poisoned_batches(queue: Any) -> None:
    ids = queue.enqueue_batch([1, 2])
    stream = queue.stream_open("s")
    (batch,) = queue.stream_claim("s", stream.epoch, 0, None)
    queue.stream_begin("s", stream.epoch, 1, batch.claim_token)
    stream = queue.stream_open("s")
    with pytest.raises(
        pgqueue.StreamPoisoned,
        match=f"gives up batch 1 after 0 replays: messages {ids[0]}, {ids[1]}",
    ):
        queue.stream_begin("s", stream.epoch, 1, batch.claim_token, max_replays=0)
    queue.purge_queue()
    with pytest.raises(pgqueue.StreamDataLost, match=f"2 of 2 messages of batch 1: {ids[0]}, {ids[1]}"):
        queue.stream_begin("s", stream.epoch, 1, batch.claim_token)
    assert queue.stream_begin("s", stream.epoch, 1, batch.claim_token, fail_on_data_loss=False).lost == ids
