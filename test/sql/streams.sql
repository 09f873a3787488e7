begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(218);

-- Returns the SQLSTATE and the message of the error that a statement raises.
create function pg_temp.raised(statement text) returns text language plpgsql as $$
declare
    message text;
begin
    execute statement;
    return 'nothing';
exception when others then
    get stacked diagnostics message = message_text;
    return sqlstate || ' ' || message;
end;
$$;
create function pg_temp.hint(statement text) returns text language plpgsql as $$
declare
    hint text;
begin
    execute statement;
    return 'nothing';
exception when others then
    get stacked diagnostics hint = pg_exception_hint;
    return hint;
end;
$$;
create function pg_temp.sent(queue text, n int) returns bigint[] language sql
as $$ select array(select pgqueue.enqueue_batch(queue, array(select to_jsonb(g) from generate_series(1, n) g))) $$;
create function pg_temp.read(b pgqueue.stream_batch, epoch bigint, partition int default null) returns bigint[] language sql
as $$ select array(select m.id from pgqueue.stream_read(b.queue_name, b.stream_name, epoch, b.seq, b.claim_token, partition) m) $$;
create function pg_temp.claimed_by_others(queue text) returns bigint[] language sql
as $$ select coalesce(array_agg(c.id), '{}') from pgqueue.claim(queue, 100, '1 h') c $$;

create function pg_temp.streams(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    s pgqueue.stream;
    t pgqueue.stream;
    b pgqueue.stream_batch;
    c pgqueue.stream_batch;
    ids bigint[];
    more bigint[];
    n int;
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', max_attempts => 3, dedicated => has_table);

    -- One batch after another.
    s := pgqueue.stream_open(queue, 's', 'alice');
    return next is(row(s.queue_name, s.stream_name, s.opened_by, s.acked_seq, s.acked_token, s.claim_token, s.messages)::text, row(queue, 's', 'alice', 0, null::uuid, null::uuid, null::int)::text,
        queue || ': a new stream has acknowledged nothing and has no open batch');
    return next is((select count(*) from pgqueue.stream_claim(queue, 's', s.epoch, 0, null)), 0::bigint, queue || ': stream_claim returns no batch if no message is ready');
    ids := pg_temp.sent(queue, 10);
    select * into b from pgqueue.stream_claim(queue, 's', s.epoch, 0, null, max_messages => 7, partitions => 3, visibility_timeout => '60 s');
    return next is(row(b.seq, b.messages, b.partitions, b.replays, b.claimed_until - b.claimed_at, b.lost)::text, row(1, 7, 3, 0, interval '60 s', '{}'::bigint[])::text, queue || ': stream_claim reserves up to max_messages as batch 1');
    return next is((select row(l.claim_token, l.messages, l.partitions, l.replays, l.claimed_until)::text from pgqueue.list_streams(queue) l), row(b.claim_token, 7, 3, 0, b.claimed_until)::text, queue || ': list_streams shows the open batch');
    return next is((select array_agg(m.id) from pgqueue.browse(queue, 'inflight') m where m.claimed_by = 'stream s'), ids[1:7], queue || ': messages of a batch are in flight and have the stream as claimed_by');
    c := pgqueue.stream_begin(queue, 's', s.epoch, b.seq, b.claim_token);
    return next is(row(c.seq, c.messages, c.partitions, c.replays, c.lost)::text, row(1, 7, 3, 0, '{}'::bigint[])::text, queue || ': stream_begin returns the batch as it was claimed');
    return next is(pg_temp.read(b, s.epoch), ids[1:7], queue || ': stream_read without a partition returns all messages of the batch in order of id');
    return next is(pg_temp.read(b, s.epoch, 0) || pg_temp.read(b, s.epoch, 1) || pg_temp.read(b, s.epoch, 2), ids[1:7], queue || ': stream_read returns every message of the batch in exactly one partition');
    return next is(array(select cardinality(pg_temp.read(b, s.epoch, p)) from generate_series(0, 2) p), array[2, 2, 3], queue || ': partitions of a batch have about the same size');
    return next is((select array_agg(m.payload) from pgqueue.stream_read(queue, 's', s.epoch, 1, b.claim_token, 2) m), array['5', '6', '7']::jsonb[], queue || ': stream_read returns messages with the payload that was sent');
    return next alike(pg_temp.raised(format('select pgqueue.stream_read(%L, %L, %s, 1, %L, 3)', queue, 's', s.epoch, b.claim_token)), '22023 invalid partition: ''3''', queue || ': stream_read refuses a partition number that is too high');
    return next is((select array_agg(r.payload) from pgqueue.receive(queue, 2) r), array['8', '9']::jsonb[], queue || ': receive returns the messages that the stream did not reserve');
    c := null;
    select * into c from pgqueue.stream_claim(queue, 's', s.epoch, 1, b.claim_token);
    return next is(row(c.seq, c.messages)::text, row(2, 1)::text, queue || ': the next stream_claim returns the next batch');
    return next isnt(c.claim_token, b.claim_token, queue || ': the next batch has another token');
    return next is((select count(*) from pgqueue.messages m where m.queue_name = queue and m.id = any (ids[1:7])), 0::bigint, queue || ': the next stream_claim acknowledges the previous batch');
    return next is((select row(l.acked_seq, l.acked_token)::text from pgqueue.list_streams(queue) l), row(1, b.claim_token)::text, queue || ': list_streams shows number and token of the last acknowledged batch');
    return next is((select count(*) from pgqueue.stream_claim(queue, 's', s.epoch, 2, c.claim_token)), 0::bigint, queue || ': stream_claim acknowledges the open batch although no message is ready');
    return next is((select row(l.acked_seq, l.claim_token)::text from pgqueue.list_streams(queue) l), row(2, null::uuid)::text, queue || ': a stream without messages has no open batch after stream_claim');
    return next is((select count(*) from pgqueue.messages m where m.queue_name = queue), 0::bigint, queue || ': no message is left in the queue after the last batch was acknowledged');
    return next is((select count(*) from pgqueue.stream_claim(queue, 's', s.epoch, 2, c.claim_token)), 0::bigint, queue || ': stream_claim with the same checkpoint can be repeated');

    -- A reader dies, at each possible point.
    b := c;
    ids := pg_temp.sent(queue, 4);
    select * into c from pgqueue.stream_claim(queue, 's', s.epoch, 2, b.claim_token, 4);
    t := pgqueue.stream_open(queue, 's', 'bob');
    return next ok(t.epoch > s.epoch, queue || ': stream_open of an existing stream returns a higher epoch');
    return next is(row(t.acked_seq, t.claim_token, t.messages)::text, row(2, c.claim_token, 4)::text, queue || ': stream_open returns the open batch');
    perform pg_temp.pass('20 s');
    more := pg_temp.sent(queue, 2);
    select * into b from pgqueue.stream_claim(queue, 's', t.epoch, 2, t.acked_token, 100);
    return next is(row(b.seq, b.claim_token, b.messages, b.claimed_until)::text, row(3, c.claim_token, 4, pgqueue._now() + interval '30 s')::text, queue || ': if the reader died after stream_claim, the next reader gets the same batch with a new visibility timeout');
    return next is((select array_agg(m.attempt_count) from pgqueue.stream_read(queue, 's', t.epoch, 3, b.claim_token) m), array[1, 1, 1, 1], queue || ': messages of an adopted batch are in their first attempt');
    perform pgqueue.stream_begin(queue, 's', t.epoch, 3, b.claim_token);
    return next is((pgqueue.stream_begin(queue, 's', t.epoch, 3, b.claim_token)).replays, 0, queue || ': a second stream_begin of the same reader does not count as a replay');
    s := pgqueue.stream_open(queue, 's');
    return next is((pgqueue.stream_begin(queue, 's', s.epoch, 3, b.claim_token)).replays, 1, queue || ': if the reader died while reading, stream_begin of the next reader counts the first replay');
    return next is(pg_temp.read(b, s.epoch), ids, queue || ': a replayed batch has the same messages');
    return next is((select array_agg(m.attempt_count) from pgqueue.stream_read(queue, 's', s.epoch, 3, b.claim_token) m), array[1, 1, 1, 1], queue || ': messages of a replayed batch are still in their first attempt');
    return next is(pgqueue.stream_ack(queue, 's', s.epoch, 3, b.claim_token), 4, queue || ': stream_ack deletes the messages of the batch');
    return next is(pgqueue.stream_ack(queue, 's', s.epoch, 3, b.claim_token), 0, queue || ': a second stream_ack returns 0');
    return next is(pgqueue.stream_ack(queue, 's', s.epoch, 2, t.acked_token), 0, queue || ': stream_ack of an earlier batch returns 0');
    return next is((select count(*) from pgqueue.stream_extend(queue, 's', s.epoch)), 0::bigint, queue || ': stream_extend returns no row if no batch is open');
    s := pgqueue.stream_open(queue, 's');
    return next is(row(s.acked_seq, s.acked_token)::text, row(3, b.claim_token)::text, queue || ': if the reader died after stream_ack, stream_open returns the acknowledged batch');
    select * into c from pgqueue.stream_claim(queue, 's', s.epoch, 3, b.claim_token);
    return next is(pg_temp.read(c, s.epoch), more, queue || ': the next reader gets the messages sent since the last batch');

    -- Two readers.
    t := pgqueue.stream_open(queue, 's', 'carol');
    return next is(
        array(
            select left(pg_temp.raised(format('select pgqueue.%s', v)), 5)
            from unnest(array[
                format('stream_claim(%L, %L, %s, 3, %L)', queue, 's', s.epoch, b.claim_token), format('stream_begin(%L, %L, %s, 4, %L)', queue, 's', s.epoch, c.claim_token),
                format('stream_read(%L, %L, %s, 4, %L)', queue, 's', s.epoch, c.claim_token), format('stream_extend(%L, %L, %s)', queue, 's', s.epoch),
                format('stream_ack(%L, %L, %s, 4, %L)', queue, 's', s.epoch, c.claim_token), format('stream_skip(%L, %L, 4, epoch => %s)', queue, 's', s.epoch)
            ]) v
        ), array_fill('PQ006'::text, array[6]), queue || ': every call with a superseded epoch raises PQ006');
    return next is(pg_temp.raised(format('select pgqueue.stream_extend(%L, %L, %s)', queue, 's', s.epoch)), format('PQ006 stream ''s'' of queue %L is fenced: epoch %s was superseded by %s', queue, s.epoch, t.epoch), queue || ': the error for a superseded epoch names both epochs');
    return next is(pg_temp.read(c, t.epoch), more, queue || ': the reader with the current epoch reads the open batch');

    -- A checkpoint that does not belong to the stream.
    return next is(
        array(
            select left(pg_temp.raised(format('select pgqueue.stream_%s', v)), 5)
            from unnest(array[
                format('claim(%L, %L, %s, 2, %L)', queue, 's', t.epoch, gen_random_uuid()), format('claim(%L, %L, %s, 3, %L)', queue, 's', t.epoch, gen_random_uuid()),
                format('claim(%L, %L, %s, 3, null)', queue, 's', t.epoch), format('claim(%L, %L, %s, 4, %L)', queue, 's', t.epoch, gen_random_uuid()), format('claim(%L, %L, %s, 4, null)', queue, 's', t.epoch),
                format('claim(%L, %L, %s, 5, %L)', queue, 's', t.epoch, c.claim_token), format('claim(%L, %L, %s, 0, null)', queue, 's', t.epoch),
                format('begin(%L, %L, %s, 3, %L)', queue, 's', t.epoch, b.claim_token), format('begin(%L, %L, %s, 4, %L)', queue, 's', t.epoch, b.claim_token), format('begin(%L, %L, %s, 5, %L)', queue, 's', t.epoch, c.claim_token),
                format('read(%L, %L, %s, 3, %L)', queue, 's', t.epoch, b.claim_token), format('read(%L, %L, %s, 4, %L)', queue, 's', t.epoch, b.claim_token), format('read(%L, %L, %s, 5, %L)', queue, 's', t.epoch, c.claim_token),
                format('ack(%L, %L, %s, 3, %L)', queue, 's', t.epoch, c.claim_token), format('ack(%L, %L, %s, 4, %L)', queue, 's', t.epoch, b.claim_token), format('ack(%L, %L, %s, 5, %L)', queue, 's', t.epoch, c.claim_token)
            ]) v
        ), array_fill('PQ007'::text, array[16]), queue || ': a wrong batch number or token raises PQ007');
    return next is(pg_temp.raised(format('select pgqueue.stream_begin(%L, %L, %s, 2, %L)', queue, 's', t.epoch, b.claim_token)), format('PQ007 stream ''s'' of queue %L is out of step: batch 2 is older than the last acknowledged batch', queue), queue || ': the error for a checkpoint that was rolled back names the batch');
    return next is(pg_temp.read(c, t.epoch), more, queue || ': a refused call does not change the open batch');
    t := pgqueue.stream_open(queue, 's');
    select * into c from pgqueue.stream_claim(queue, 's', t.epoch, t.acked_seq, t.acked_token);
    return next is(row(c.seq, pg_temp.read(c, t.epoch))::text, row(4, more)::text, queue || ': a reader without its checkpoint goes on with the open batch, after what stream_open returned');
    perform pgqueue.stream_ack(queue, 's', t.epoch, 4, c.claim_token);

    -- stream_extend.
    ids := pg_temp.sent(queue, 3);
    select * into b from pgqueue.stream_claim(queue, 's', t.epoch, 4, c.claim_token);
    perform pg_temp.pass('20 s');
    select * into c from pgqueue.stream_extend(queue, 's', t.epoch);
    return next is(row(c.seq, c.messages, c.claimed_until, c.lost)::text, row(5, 3, pgqueue._now() + interval '30 s', '{}'::bigint[])::text, queue || ': stream_extend renews the visibility timeout with which the batch was claimed');
    perform pg_temp.pass('20 s');
    return next is(pg_temp.claimed_by_others(queue), '{}'::bigint[], queue || ': claim does not return messages of an extended batch');
    select * into c from pgqueue.stream_extend(queue, 's', t.epoch, '5 min');
    return next is(c.claimed_until, pgqueue._now() + interval '5 min', queue || ': stream_extend uses the visibility timeout that it was given');

    -- The visibility timeout of a batch ends.
    perform pg_temp.pass('5 min 1 s');
    return next is(pg_temp.read(b, t.epoch), ids, queue || ': stream_read returns an expired batch whose messages were not claimed since');
    return next is((pgqueue.stream_begin(queue, 's', t.epoch, 5, b.claim_token)).claimed_until, pgqueue._now() + interval '30 s', queue || ': stream_begin renews the visibility timeout of an expired batch');
    return next is(pg_temp.claimed_by_others(queue), '{}'::bigint[], queue || ': claim does not return messages of a renewed batch');
    perform pg_temp.pass('31 s');
    return next is((select array_agg(m.id) from pgqueue.claim(queue, 2, '1 h') m), ids[1:2], queue || ': claim returns messages of a batch whose visibility timeout has ended');
    return next is(pg_temp.raised(format('select pgqueue.stream_read(%L, %L, %s, 5, %L)', queue, 's', t.epoch, b.claim_token)),
        format('PQ008 stream ''s'' of queue %L has lost 2 of 3 messages of batch 5: %s, %s', queue, ids[1], ids[2]), queue || ': stream_read raises PQ008 and names the lost messages');
    return next is((select e.lost from pgqueue.stream_extend(queue, 's', t.epoch) e), ids[1:2], queue || ': stream_extend returns the lost messages');
    s := pgqueue.stream_open(queue, 's');
    return next is(left(pg_temp.raised(format('select pgqueue.stream_begin(%L, %L, %s, 5, %L)', queue, 's', s.epoch, b.claim_token)), 5), 'PQ008', queue || ': stream_begin of a batch with lost messages raises PQ008');
    select * into c from pgqueue.stream_claim(queue, 's', s.epoch, s.acked_seq, s.acked_token);
    return next is(row(c.messages, c.lost, c.claim_token)::text, row(1, ids[1:2], b.claim_token)::text, queue || ': stream_claim after the last acknowledged batch then leaves out the lost messages');
    return next is((pgqueue.stream_begin(queue, 's', s.epoch, 5, b.claim_token)).messages, 1, queue || ': stream_begin returns the remaining batch');
    return next is(pg_temp.read(b, s.epoch), ids[3:3], queue || ': stream_read then returns the remaining messages');
    return next is((pgqueue.stream_begin(queue, 's', s.epoch, 5, b.claim_token)).lost, '{}'::bigint[], queue || ': a later stream_begin does not return the lost messages again');
    return next is(pgqueue.stream_ack(queue, 's', s.epoch, 5, b.claim_token), 1, queue || ': stream_ack acknowledges only the remaining messages');
    return next is((select array_agg(m.id) from pgqueue.browse(queue, 'inflight') m), ids[1:2], queue || ': lost messages stay in flight with the consumer that claimed them');
    perform pgqueue.purge_queue(queue);

    -- A batch without an owner, of which messages were lost.
    ids := pg_temp.sent(queue, 2);
    select * into c from pgqueue.stream_claim(queue, 's', s.epoch, 5, b.claim_token, visibility_timeout => '10 s');
    perform pg_temp.pass('11 s');
    perform pgqueue.claim(queue, 1, '1 h');
    s := pgqueue.stream_open(queue, 's');
    select * into t from pgqueue.list_streams(queue);
    select d.seq, d.claim_token, d.messages, d.lost into c.seq, c.claim_token, c.messages, c.lost from pgqueue.stream_claim(queue, 's', s.epoch, 5, b.claim_token) d;
    return next is(row(c.seq, c.claim_token, c.messages, c.lost)::text, row(6, t.claim_token, 1, ids[1:1])::text, queue || ': stream_claim adopts an open batch without the messages that others have claimed');
    perform pg_temp.pass('11 s');
    perform pgqueue.claim(queue, 1, '1 h');
    select * into c from pgqueue.stream_claim(queue, 's', s.epoch, 5, b.claim_token);
    return next ok(c.seq = 6 and c.claim_token = t.claim_token and c.messages = 0 and c.lost = ids[2:2], queue || ': stream_claim returns an empty batch if no message of the open batch is left');
    perform pgqueue.stream_ack(queue, 's', s.epoch, 6, c.claim_token);
    perform pgqueue.purge_queue(queue);

    -- A batch that fails repeatedly.
    ids := pg_temp.sent(queue, 25);
    select * into b from pgqueue.stream_claim(queue, 's', s.epoch, 6, c.claim_token);
    perform pgqueue.stream_begin(queue, 's', s.epoch, 7, b.claim_token, max_replays => 2);
    for n in 1..2 loop
        s := pgqueue.stream_open(queue, 's');
        perform pgqueue.stream_begin(queue, 's', s.epoch, 7, b.claim_token, max_replays => 2);
    end loop;
    s := pgqueue.stream_open(queue, 's');
    return next is(pg_temp.raised(format('select pgqueue.stream_begin(%L, %L, %s, 7, %L, max_replays => 2)', queue, 's', s.epoch, b.claim_token)),
        format('PQ009 stream ''s'' of queue %L gives up batch 7 after 2 replays: messages %s and 5 more', queue, array_to_string(ids[1:20], ', ')), queue || ': stream_begin raises PQ009 after max_replays and names the messages');
    s := pgqueue.stream_open(queue, 's');
    return next is(left(pg_temp.raised(format('select pgqueue.stream_begin(%L, %L, %s, 7, %L, max_replays => 2)', queue, 's', s.epoch, b.claim_token)), 5), 'PQ009', queue || ': stream_begin raises PQ009 again for the next reader');
    return next is((pgqueue.stream_begin(queue, 's', s.epoch, 7, b.claim_token, max_replays => null)).replays, 3, queue || ': stream_begin with max_replays null returns the batch again');
    return next is(pgqueue.stream_skip(queue, 's', 7, ids[2:3] || ids[3] || ids[1] - 1000000, 'poison'), 2, queue || ': stream_skip returns the number of skipped messages and ignores repeated and foreign ids');
    return next is((select array_agg((d.id, d.reason, d.last_error)::text) from pgqueue.browse_dead_messages(queue) d), array[(ids[2], 'rejected', 'poison')::text, (ids[3], 'rejected', 'poison')::text], queue || ': skipped messages are dead letters with reason rejected and the given error');
    return next is(left(pg_temp.raised(format('select pgqueue.stream_read(%L, %L, %s, 7, %L)', queue, 's', s.epoch, b.claim_token)), 5), 'PQ006', queue || ': stream_skip without an epoch ends the epoch of the current reader');
    s := pgqueue.stream_open(queue, 's');
    c := pgqueue.stream_begin(queue, 's', s.epoch, 7, b.claim_token, max_replays => 2);
    return next is(row(c.messages, c.replays, c.lost)::text, row(23, 1, '{}'::bigint[])::text, queue || ': the rest of the batch starts over after stream_skip');
    return next is(pg_temp.read(b, s.epoch), ids[1:1] || ids[4:25], queue || ': stream_read returns the rest of the batch after stream_skip');
    return next is(pgqueue.stream_skip(queue, 's', 7, ids[4:4], epoch => s.epoch), 1, queue || ': stream_skip with the epoch of the reader skips a message');
    return next is(pg_temp.read(b, s.epoch), ids[1:1] || ids[5:25], queue || ': the reader with that epoch goes on reading the rest of the batch');
    return next is((select d.last_error from pgqueue.browse_dead_messages(queue) d where d.id = ids[4]), 'skipped with batch 7 of stream s after 1 replay', queue || ': the default error of a skipped message names batch, stream and replays');
    return next is(pgqueue.stream_skip(queue, 's', 7), 22, queue || ': stream_skip without ids skips the whole batch');
    return next is(pgqueue.stream_skip(queue, 's', 7), 0, queue || ': stream_skip of an empty batch returns 0');
    s := pgqueue.stream_open(queue, 's');
    c := pgqueue.stream_begin(queue, 's', s.epoch, 7, b.claim_token, max_replays => 0);
    return next is(row(c.seq, c.messages, c.partitions, pg_temp.read(b, s.epoch))::text, row(7, 0, 1, '{}'::bigint[])::text, queue || ': stream_begin returns a batch whose messages were all skipped as an empty batch, whatever max_replays is');
    more := pg_temp.sent(queue, 1);
    select * into c from pgqueue.stream_claim(queue, 's', s.epoch, 7, b.claim_token);
    return next is(row(c.seq, pg_temp.read(c, s.epoch))::text, row(8, more)::text, queue || ': stream_claim returns the next batch behind the skipped one');
    return next is(pgqueue.redrive(queue), 25, queue || ': redrive sends all skipped messages back');
    perform pgqueue.stream_ack(queue, 's', s.epoch, 8, c.claim_token);
    perform pgqueue.purge_queue(queue);

    -- A batch that is limited by bytes.
    perform pgqueue.enqueue_batch(queue, array_fill(to_jsonb(repeat('x', 1000)), array[100]));
    b := c;
    select * into c from pgqueue.stream_claim(queue, 's', s.epoch, 8, b.claim_token, max_bytes => 20000);
    return next ok(c.messages between 18 and 20, queue || ': stream_claim with max_bytes ends the batch when its payloads have about that size');
    b := c;
    select * into c from pgqueue.stream_claim(queue, 's', s.epoch, 9, b.claim_token, max_bytes => 1);
    return next is(c.messages, 10, queue || ': a batch with a low max_bytes has 10 messages');
    return next is(pg_temp.read(c, s.epoch), array(select m.id from pgqueue.messages m where m.queue_name = queue order by m.id limit 10), queue || ': the next batch continues with the messages that the limit has left');
    b := c;
    select * into c from pgqueue.stream_claim(queue, 's', s.epoch, 10, b.claim_token, max_messages => 15, max_bytes => 9223372036854775807);
    return next is(c.messages, 15, queue || ': a batch with the highest max_bytes has max_messages');
    perform pgqueue.stream_ack(queue, 's', s.epoch, 11, c.claim_token);
    perform pgqueue.purge_queue(queue);

    -- Other verbs of the queue.
    ids := pg_temp.sent(queue, 3);
    perform pgqueue.pause_queue(queue);
    return next is((select count(*) from pgqueue.stream_claim(queue, 's', s.epoch, 11, c.claim_token)), 0::bigint, queue || ': stream_claim returns no batch while the queue is paused');
    perform pgqueue.resume_queue(queue);
    select * into b from pgqueue.stream_claim(queue, 's', s.epoch, 11, c.claim_token);
    perform pgqueue.pause_queue(queue);
    return next is((select d.claim_token from pgqueue.stream_claim(queue, 's', s.epoch, 11, c.claim_token) d), b.claim_token, queue || ': stream_claim adopts the open batch while the queue is paused');
    perform pgqueue.resume_queue(queue);
    return next is((select array_agg(f.finding) from pgqueue.doctor() f where f.queue_name = queue and f.finding ~ 'stream'), null, queue || ': doctor does not report a stream whose batch has not expired');
    perform pg_temp.pass('91 s');
    return next is((select array_agg(f.severity || ' ' || f.finding) from pgqueue.doctor() f where f.queue_name = queue and f.finding ~ 'stream'), array['warning lapsed_stream'], queue || ': doctor reports a stream whose batch has expired');
    return next is(pgqueue.purge_queue(queue), 3::bigint, queue || ': purge_queue deletes messages of the open batch');
    return next is(left(pg_temp.raised(format('select pgqueue.stream_read(%L, %L, %s, 12, %L)', queue, 's', s.epoch, b.claim_token)), 5), 'PQ008', queue || ': stream_read of a purged batch raises PQ008');
    return next is((select array_agg((f.severity, f.finding)::text) from pgqueue.doctor() f where f.queue_name = queue and f.finding ~ 'stream'), array['(warning,lapsed_stream)'], queue || ': doctor still reports a stream whose batch was purged');
    execute substring((select f.repair from pgqueue.doctor() f where f.queue_name = queue and f.finding ~ 'stream') from 'select .*$');
    return next is((select count(*) from pgqueue.list_streams(queue)), 0::bigint, queue || ': the repair of lapsed_stream drops the stream');

    ids := pg_temp.sent(queue, 3);
    t := pgqueue.stream_open(queue, 's');
    return next ok(t.epoch > s.epoch, queue || ': a stream that is opened again after a drop has a higher epoch');
    return next is(left(pg_temp.raised(format('select pgqueue.stream_claim(%L, %L, %s, 10, %L)', queue, 's', t.epoch, c.claim_token)), 5), 'PQ007', queue || ': stream_claim of the new stream refuses a checkpoint of the dropped stream');
    select * into b from pgqueue.stream_claim(queue, 's', t.epoch, 0, null, max_messages => 2);
    return next is(left(pg_temp.raised(format('select pgqueue.stream_claim(%L, %L, %s, 1, %L)', queue, 's', t.epoch, gen_random_uuid())), 5), 'PQ007', queue || ': stream_claim refuses the number of the open batch with another token');
    return next is(pgqueue.drop_stream(queue, 's'), 2, queue || ': drop_stream returns the number of messages in the open batch');
    return next is((select array_agg((m.id, m.attempt_count)::text) from pgqueue.claim(queue, 10) m), array[(ids[1], 1)::text, (ids[2], 1)::text, (ids[3], 1)::text], queue || ': claim returns messages of a dropped stream at once and in their first attempt');
    return next is(left(pg_temp.raised(format('select pgqueue.stream_read(%L, %L, %s, 1, %L)', queue, 's', t.epoch, b.claim_token)), 5), 'PQ005', queue || ': stream_read of a dropped stream raises PQ005');

    -- Two streams of one queue.
    perform pgqueue.purge_queue(queue);
    ids := pg_temp.sent(queue, 4);
    s := pgqueue.stream_open(queue, 's');
    t := pgqueue.stream_open(queue, 't');
    select * into b from pgqueue.stream_claim(queue, 's', s.epoch, 0, null, 2);
    select * into c from pgqueue.stream_claim(queue, 't', t.epoch, 0, null, 3);
    return next is(pg_temp.read(b, s.epoch) || pg_temp.read(c, t.epoch), ids, queue || ': two streams of a queue reserve different messages');
    return next is((select array_agg(l.stream_name || l.messages) from pgqueue.list_streams(queue) l), array['s2', 't2'], queue || ': list_streams returns the streams of a queue in order of name');
    perform pgqueue.drop_queue(queue);
    return next is((select count(*) from pgqueue.streams r where r.queue_name = queue), 0::bigint, queue || ': drop_queue drops the streams of the queue');
    perform pgqueue.create_queue(queue, dedicated => has_table);
    return next is(left(pg_temp.raised(format('select pgqueue.stream_claim(%L, %L, %s, 0, null)', queue, 's', s.epoch)), 5), 'PQ005', queue || ': a new queue of the same name does not have the old streams');
end;
$$;
select pg_temp.streams('streams_shared', false);
select pg_temp.streams('streams_dedicated', true);

-- Attempts, dead letters and large batches.
select lives_ok($$ select pgqueue.create_queue('streams', visibility_timeout => '10 s', max_attempts => 1, dlq_enabled => false) $$, 'a queue without dead letters is created');
create function pg_temp.attempts() returns setof text language plpgsql as $$
declare
    ids bigint[] := pg_temp.sent('streams', 2);
    s pgqueue.stream := pgqueue.stream_open('streams', 's');
    b pgqueue.stream_batch;
begin
    select * into b from pgqueue.stream_claim('streams', 's', s.epoch, 0, null);
    perform pgqueue.claim('streams');
    return next is(pg_temp.read(b, s.epoch), ids, 'claim makes no dead letters of messages in their last attempt before their batch expires');
    s := pgqueue.stream_open('streams', 's');
    perform pgqueue.stream_begin('streams', 's', s.epoch, 1, b.claim_token);
    s := pgqueue.stream_open('streams', 's');
    perform pgqueue.stream_begin('streams', 's', s.epoch, 1, b.claim_token);
    return next is(pg_temp.read(b, s.epoch), ids, 'replays make no dead letters of messages in their last attempt');
    return next is(pgqueue.stream_skip('streams', 's', 1, ids[1:1]), 1, 'stream_skip returns the number of skipped messages if the queue has no dead letters');
    return next is((select array_agg(m.id) from pgqueue.messages m where m.queue_name = 'streams'), ids[2:2], 'stream_skip deletes skipped messages if the queue has no dead letters');
    perform pg_temp.pass('11 s');
    perform pgqueue.claim('streams');
    s := pgqueue.stream_open('streams', 's');
    return next is(pg_temp.raised(format('select pgqueue.stream_begin(%L, %L, %s, 1, %L)', 'streams', 's', s.epoch, b.claim_token)), format('PQ008 stream ''s'' of queue ''streams'' has lost 1 of 2 messages of batch 1: %s', ids[2]), 'claim makes dead letters of messages of an expired batch in their last attempt, and the stream reports them as lost');
    return next is(pgqueue.stream_skip('streams', 's', 1), 0, 'stream_skip without ids skips a batch whose messages are lost');
    s := pgqueue.stream_open('streams', 's');
    return next is((pgqueue.stream_begin('streams', 's', s.epoch, 1, b.claim_token)).messages, 0, 'stream_begin returns a skipped batch without messages as an empty batch');
    perform pgqueue.stream_ack('streams', 's', s.epoch, 1, b.claim_token);
    perform pg_temp.sent('streams', 11000);
    select d.* into b from pgqueue.stream_claim('streams', 's', s.epoch, 1, b.claim_token, max_messages => 10500, partitions => 7) d;
    return next is((select row(b.messages, count(*), count(distinct m.id), min(m.n), max(m.n))::text
        from (select m.id, count(*) over (partition by p) as n from generate_series(0, 6) p cross join lateral pgqueue.stream_read('streams', 's', s.epoch, 2, b.claim_token, p) m) m),
        row(10500, 10500, 10500, 1500, 1500)::text, 'a batch of 10,500 messages is read in 7 equal partitions, each message once');
    return next is((select d.messages from pgqueue.stream_claim('streams', 's', s.epoch, 2, b.claim_token, max_messages => 100000) d), 500, 'the next batch contains the remaining 500 messages');
end;
$$;
select pg_temp.attempts();
select throws_ok($$ select pgqueue.list_streams('streams_nowhere') $$, 'PQ001', null, 'list_streams refuses an unknown queue');
select is((select array_agg(l.queue_name || ' ' || l.stream_name) from pgqueue.list_streams() l where l.queue_name = 'streams'), array['streams s'], 'list_streams without a queue returns the streams of all queues');

-- A limit would refuse the claim that acknowledges the open batch.
select pgqueue.create_queue('streams_limited', max_in_flight => 5), pgqueue.alter_queue('streams_limited', max_in_flight => 0), pgqueue.enqueue('streams_limited', '1') \g /dev/null
select epoch from pgqueue.stream_open('streams_limited', 's') \gset
select claim_token from pgqueue.stream_claim('streams_limited', 's', :epoch, 0, null) \gset
select throws_ok($$ select pgqueue.alter_queue('streams_limited', rate_limit => 5) $$, '22023', 'invalid rate_limit: ''5''', 'alter_queue gives no rate_limit to a queue with a stream');
select throws_ok($$ select pgqueue.alter_queue('streams_limited', max_in_flight => 4) $$, '22023', 'invalid max_in_flight: ''4''', 'alter_queue gives no max_in_flight to a queue with a stream');
select alike(pg_temp.hint($$ select pgqueue.alter_queue('streams_limited', rate_limit => 5) $$), '%drop_stream(''streams_limited'', ''s'')%', 'the hint names the call that drops the stream');
select is((pgqueue.alter_queue('streams_limited', max_attempts => 4)).max_attempts, 4, 'alter_queue changes the other settings of a queue with a stream');
select lives_ok(format('select pgqueue.stream_claim(%L, %L, %s, 1, %L)', 'streams_limited', 's', :epoch, :'claim_token'), 'the stream goes on after limits were refused');
select is((select l.acked_seq from pgqueue.list_streams('streams_limited') l), 1::bigint, 'the stream has acknowledged its batch');
select pgqueue.drop_stream('streams_limited', 's') \g /dev/null
select is((pgqueue.alter_queue('streams_limited', rate_limit => 5)).rate_limit, 5, 'alter_queue gives a rate_limit after the stream was dropped');
select pgqueue.stream_open('streams_limited', 's') \g /dev/null
select is((pgqueue.alter_queue('streams_limited', rate_limit => 6)).rate_limit, 6, 'alter_queue changes a rate_limit although a stream was opened that cannot be read');
select is((pgqueue.alter_queue('streams_limited', rate_limit => 0)).rate_limit, null, 'alter_queue ends the rate_limit of a queue with a stream');

-- Costs. Messages are not looked for in the tables of other queues: on PostgreSQL 15 that would be 1,600 pages.
select pgqueue.create_queue('streams_other_' || n, dedicated => true) from generate_series(1, 10) n \g /dev/null
select pgqueue.create_queue('streams_pages') \g /dev/null
select pgqueue.enqueue_batch('streams_pages', array_fill('1'::jsonb, array[50])) \g /dev/null
select epoch from pgqueue.stream_open('streams_pages', 's') \gset
select claim_token from pgqueue.stream_claim('streams_pages', 's', :epoch, 0, null) \gset
create function pg_temp.pages(statement text) returns int language plpgsql as $$
declare
    plan json;
begin
    execute 'explain (analyze, buffers, timing off, format json) ' || statement into plan;
    return (plan -> 0 -> 'Plan' ->> 'Shared Hit Blocks')::int + (plan -> 0 -> 'Plan' ->> 'Shared Read Blocks')::int;
end;
$$;
select count(pg_temp.pages(format('select pgqueue.stream_read(%L, %L, %s, 1, %L)', 'streams_pages', 's', :epoch, :'claim_token'))) as warmed \gset
select cmp_ok(pg_temp.pages('select pgqueue.' || c), '<', 800, format('%s reads the table of its queue only', split_part(c, '(', 1)))
from (values
    (format('stream_read(%L, %L, %s, 1, %L)', 'streams_pages', 's', :epoch, :'claim_token')),
    (format('stream_extend(%L, %L, %s)', 'streams_pages', 's', :epoch)),
    (format('stream_ack(%L, %L, %s, 1, %L)', 'streams_pages', 's', :epoch, :'claim_token'))
) as v (c);

select * from finish();
rollback;
