begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';

select plan(205);

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
-- Stages payloads as one attempt of a partition.
create function pg_temp.staged(queue text, run uuid, partition int, attempt bigint, payloads jsonb[]) returns uuid language plpgsql as $$
declare
    token uuid := pgqueue.sink_stage(queue, run, partition, attempt);
begin
    insert into pgqueue.staged_messages (token, row_number, payloads) select token, p.n, p.two from (values (1, payloads[:2]), (3, payloads[3:])) p (n, two) where p.two <> '{}';
    return token;
end;
$$;
-- PL/pgSQL is needed: up to PostgreSQL 17 an SQL function reuses a plan from before a table was attached.
create function pg_temp.sent(queue text) returns jsonb[] language plpgsql
as $$ begin return (select coalesce(array_agg(m.payload order by m.id), '{}') from pgqueue.messages m where m.queue_name = queue); end $$;
create function pg_temp.left_over(r uuid) returns bigint[] language sql
as $$ select array[(select count(*) from pgqueue.staged_attempts a where a.run = r),
    (select coalesce(sum(s.messages), 0) from pgqueue.staged_messages s where s.token in (select a.token from pgqueue.staged_attempts a where a.run = r))] $$;
create function pg_temp.run(n int) returns uuid language sql immutable as $$ select ('00000000-0000-0000-0000-' || lpad(n::text, 12, '0'))::uuid $$;

create function pg_temp.sinks(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    run uuid := gen_random_uuid();
    again uuid := gen_random_uuid();
    first uuid;
    second uuid;
    third uuid;
    loser uuid;
    m pgqueue.messages;
begin
    perform pgqueue.create_queue(queue, max_attempts => 7, max_payload_bytes => 100, dedicated => has_table);

    -- A run with three partitions. Partition 1 has two attempts, and only one of them is committed.
    first := pg_temp.staged(queue, run, 0, 10, '{1,2}');
    loser := pg_temp.staged(queue, run, 1, 11, '{30,40}');
    second := pg_temp.staged(queue, run, 1, 12, '{3,4}');
    third := pg_temp.staged(queue, run, 2, 13, '{}');
    return next is(pg_temp.sent(queue), '{}', queue || ': staged messages are not in the queue before the commit');
    return next is((select count(*) from pgqueue.claim(queue, 10)), 0::bigint, queue || ': claim does not return staged messages');
    return next is(pgqueue.sink_commit(run, array[first, second, third], '{2,2,0}', 'app-' || queue, 1), true, queue || ': sink_commit of a new version returns true');
    return next is(pg_temp.sent(queue), '{1,2,3,4}', queue || ': sink_commit sends the messages of the committed attempts, in order of partition and row');
    return next is(pg_temp.left_over(run), '{0,0}', queue || ': sink_commit deletes all staged rows of the run');
    select * into m from pgqueue.messages where messages.queue_name = queue order by id limit 1;
    return next is(row(m.max_attempts, m.attempt_count, m.enqueued_at, m.visible_at, m.expires_at, m.claim_token, m.body, m.headers)::text,
        row(7, 0, pgqueue._now(), pgqueue._now(), null::timestamptz, null::uuid, null::bytea, null::jsonb)::text, queue || ': a committed message has the settings and times that enqueue would give it');
    return next is((select row(c.run, c.messages, c.committed_by, c.committed_at)::text from pgqueue.sink_commits c where c.app_id = 'app-' || queue and c.version = 1),
        row(run, 4, session_user, pgqueue._now())::text, queue || ': sink_commits records run, number of messages, role and time of the commit');

    -- The same version again.
    first := pg_temp.staged(queue, again, 0, 20, '{1,2,3,4}');
    return next is(pgqueue.sink_commit(again, array[first], '{4}', 'app-' || queue, 1), false, queue || ': sink_commit of a version that was committed before returns false');
    return next is(row(pg_temp.sent(queue), pg_temp.left_over(again))::text, row('{1,2,3,4}'::jsonb[], '{0,0}'::bigint[])::text, queue || ': sink_commit of a version that was committed before sends nothing and deletes the staged rows');
    return next is(pgqueue.sink_commit(run, array[second], '{2}', 'app-' || queue, 1), false, queue || ': a second sink_commit of the same run returns false');
    first := pg_temp.staged(queue, again, 0, 20, '{5}');
    return next is(pgqueue.sink_commit(again, array[first], '{1}', 'app-' || queue, 0), true, queue || ': sink_commit of a lower new version returns true');
    first := pg_temp.staged(queue, again, 0, 20, '{6}');
    return next is(pgqueue.sink_commit(again, array[first], '{1}', 'other-' || queue, 1), true, queue || ': sink_commit of the same version of another app_id returns true');
    return next is(pg_temp.sent(queue), '{1,2,3,4,5,6}', queue || ': messages of the lower version and of the other app_id are sent');

    -- Without an app_id.
    run := gen_random_uuid();
    first := pg_temp.staged(queue, run, 0, 1, '{7}');
    return next is(pgqueue.sink_commit(run, array[first], '{1}'), true, queue || ': sink_commit without app_id and version returns true for a new run');
    return next is(pgqueue.sink_commit(run, array[first], '{1}'), false, queue || ': sink_commit without app_id and version returns false for a committed run');
    return next is(pgqueue.sink_commit(gen_random_uuid(), '{}', '{}', 'app-' || queue, 7), true, queue || ': sink_commit without attempts returns true');
    return next is(pg_temp.sent(queue), '{1,2,3,4,5,6,7}', queue || ': sink_commit without attempts sends nothing');
    perform pgqueue.purge_queue(queue);

    -- Every column of a staged row.
    run := gen_random_uuid();
    first := pgqueue.sink_stage(queue, run, 0, 1);
    insert into pgqueue.staged_messages (token, row_number, payloads, bodies, headers, message_ids, delays, expires_in) values
    (first, 3, array['"sooner"', 'null']::jsonb[], null, null, null, '{1 h,null}', null),
    (first, 1, array[null, '"later"']::jsonb[], '{"\\x00ff",null}', array['{"a": 1}', null]::jsonb[], array[pg_temp.run(1), null], '{0,1 day}', '{1 h,36 h}');
    return next is(pgqueue.sink_commit(run, array[first], '{4}'), true, queue || ': sink_commit accepts due and delayed messages in one run');
    return next is((select array_agg(row(x.payload, x.body, x.headers, x.message_id, x.expires_at)::text order by x.id) from pgqueue.messages x where x.queue_name = queue),
        array[row(null::jsonb, '\x00ff'::bytea, '{"a": 1}'::jsonb, pg_temp.run(1), pgqueue._now() + interval '1 h')::text, row('null'::jsonb, null::bytea, null::jsonb, null::uuid, null::timestamptz)::text],
        queue || ': a committed message has its body, headers, message_id and expiry');
    return next is((select array_agg(row(x.payload, x.due_at - pgqueue._now(), x.expires_at - pgqueue._now(), x.max_attempts)::text order by x.due_at) from pgqueue.scheduled_messages x where x.queue_name = queue),
        array[row('"sooner"'::jsonb, interval '1 h', null::interval, 7)::text, row('"later"'::jsonb, interval '1 day', interval '1 day 12 h', 7)::text], queue || ': a delayed message is scheduled from the time of the commit');
    return next is((select pgqueue._from_micros(pg_sequence_last_value(q.first_due_at)) from pgqueue.queues q where q.name = queue), pgqueue._now() + interval '1 h', queue || ': sink_commit sets the register first_due_at to the earliest due time');

    run := gen_random_uuid();
    first := pgqueue.sink_stage(queue, run, 0, 1);
    insert into pgqueue.staged_messages (token, row_number, payloads, delays) values
    (first, 4, '{4,5}', '{1 h,1 day}'), (first, 1, '{1,2,3}', '{1 h,1 day,1 h}');
    perform pgqueue.sink_commit(run, array[first], '{5}');
    return next is((select array_agg(row(x.payload, x.due_at - pgqueue._now())::text order by x.id) from pgqueue.scheduled_messages x where x.queue_name = queue and jsonb_typeof(x.payload) = 'number'),
        array(select row(d.n::text::jsonb, d.due)::text from (values (1, interval '1 h'), (2, '1 day'), (3, '1 h 0.000001 s'), (4, '1 h 0.000002 s'), (5, '1 day 0.000001 s')) d (n, due)),
        queue || ': delayed messages of one commit have distinct due times, because claims continue from a due time');

    run := gen_random_uuid();
    first := pgqueue.sink_stage(queue, run, 0, 1);
    insert into pgqueue.staged_messages (token, row_number, payloads, headers, group_keys, priorities, delays) values
    (first, 1, '{1,2,3,4}', array['{"a": 1, "pgqueue.group": "old"}', null, '{"b": 1}', null]::jsonb[], array['g', null, null, repeat('k', 255)], '{0,9,null,null}', '{1 h,1 h,1 h,1 h}');
    perform pgqueue.sink_commit(run, array[first], '{4}');
    return next is((select array_agg(x.headers order by x.id) from (select * from pgqueue.scheduled_messages x where x.queue_name = queue order by x.id desc limit 4) x),
        array['{"a": 1, "pgqueue.group": "g", "pgqueue.priority": 0}', '{"pgqueue.priority": 9}', '{"b": 1}', jsonb_build_object('pgqueue.group', repeat('k', 255))]::jsonb[],
        queue || ': group_keys and priorities become headers, and replace such headers');

    -- Messages at their upper limits.
    run := gen_random_uuid();
    first := pgqueue.sink_stage(queue, run, 0, 1);
    insert into pgqueue.staged_messages (token, row_number, payloads, bodies, headers, delays) values
    (first, 1, array[to_jsonb(repeat('x', 98)), null], array[null, convert_to(repeat('x', 100), 'utf8')], array[null, jsonb_build_object('a', repeat('x', 65527))], '{0,0}'),
    (first, 3, array[to_jsonb(repeat('x', 98))], null, null, '{10 years}');
    return next is(pgqueue.sink_commit(run, array[first], '{3}'), true, queue || ': sink_commit accepts payload, body, headers and delay at their limits');

    -- Invalid rows.
    return query select is(pg_temp.raised(format($f$
        do $d$ declare token uuid := pgqueue.sink_stage(%1$L, pg_temp.run(2), 3, 1); begin
            insert into pgqueue.staged_messages (token, row_number, payloads) values (token, 1, '{1}');
            insert into pgqueue.staged_messages (token, row_number, %2$s) values (token, 2, %3$s);
            perform pgqueue.sink_commit(pg_temp.run(2), array[token], '{3}', 'bad', 1);
        end $d$ $f$, queue, w.columns, w.given)), w.error, queue || ': sink_commit refuses a row that ' || w.sentence)
    from (values
        ('payloads', 'array[''1'', null]::jsonb[]', '22023 row 3 of partition 3: invalid payload: null', 'has neither payload nor body'),
        ('payloads, message_ids', '''{1}'', array[null, pg_temp.run(1)]', '22023 row 3 of partition 3: invalid payload: null', 'has only a message_id'),
        ('payloads, bodies', '''{1,1}'', array[null, ''1'']::bytea[]', '22023 row 3 of partition 3: invalid payload: ''1''', 'has both a payload and a body'),
        ('payloads', 'array[''1'', to_jsonb(repeat(''x'', 99))]', format('PQ003 row 3 of partition 3: payload of 101 bytes is over the limit of 100 bytes of queue %L', queue), 'has a payload over the limit, measured as JSON text'),
        ('payloads, delays', 'array[''1'', to_jsonb(repeat(''x'', 99))], ''{1 h,1 h}''', format('PQ003 row 3 of partition 3: payload of 101 bytes is over the limit of 100 bytes of queue %L', queue), 'has a delayed payload over the limit'),
        ('payloads', '''{1,1e200}''', format('PQ003 row 3 of partition 3: payload of 201 bytes is over the limit of 100 bytes of queue %L', queue), 'has a payload over the limit whose stored form is smaller'),
        ('payloads, messages, largest_bytes', '''{1,1e200}'', 2, 1', format('PQ003 row 3 of partition 3: payload of 201 bytes is over the limit of 100 bytes of queue %L', queue), 'has a payload over the limit and claims to be smaller'),
        ('bodies', 'array[''1'', convert_to(repeat(''x'', 101), ''utf8'')]', format('PQ003 row 3 of partition 3: body of 101 bytes is over the limit of 100 bytes of queue %L', queue), 'has a body over the limit'),
        ('payloads, headers', '''{1,1}'', array[null, ''[1]'']::jsonb[]', '22023 row 3 of partition 3: invalid headers: ''[1]''', 'has headers that are not an object'),
        ('payloads, headers', '''{1,1}'', array[null, jsonb_build_object(''a'', repeat(''x'', 65528))]', format('PQ003 row 3 of partition 3: headers of 65537 bytes is over the limit of 65536 bytes of queue %L', queue), 'has headers over the limit'),
        ('payloads, headers, priorities', '''{1,1}'', array[null, jsonb_build_object(''a'', repeat(''x'', 65527))], ''{null,1}''', format('PQ003 row 3 of partition 3: headers of 65559 bytes is over the limit of 65536 bytes of queue %L', queue), 'has headers that are over the limit with the priority'),
        ('payloads, group_keys', '''{1,1}'', array[''g'', '''']', '22023 row 3 of partition 3: invalid group_key: ''''', 'has an empty group_key'),
        ('payloads, group_keys', '''{1,1}'', array[null, repeat(''k'', 256)]', format('22023 row 3 of partition 3: invalid group_key: %L', repeat('k', 200)), 'has a group_key over 255 characters'),
        ('payloads, priorities', '''{1,1}'', ''{9,10}''', '22023 row 3 of partition 3: invalid priority: ''10''', 'has a priority over 9'),
        ('payloads, priorities', '''{1}'', ''{null,0}''', '22023 row 3 of partition 3: invalid payload: null', 'has only a priority'),
        ('payloads, dedup_keys', '''{1,1}'', array[''k'', '''']', '22023 row 3 of partition 3: invalid dedup_key: ''''', 'has an empty dedup_key'),
        ('payloads, dedup_keys', '''{1,1}'', array[null, repeat(''k'', 256)]', format('22023 row 3 of partition 3: invalid dedup_key: %L', repeat('k', 200)), 'has a dedup_key over 255 characters'),
        ('payloads, dedup_keys', '''{1}'', ''{null,k}''', '22023 row 3 of partition 3: invalid payload: null', 'has only a dedup_key'),
        ('payloads, delays', '''{1,1}'', ''{0,-1 s}''', '22023 row 3 of partition 3: invalid delay: ''-00:00:01''', 'has a negative delay'),
        ('payloads, delays', '''{1,1}'', ''{0,11 years}''', '22023 row 3 of partition 3: invalid delay: ''11 years''', 'has a delay over 10 years'),
        ('payloads, delays', '''{1,1}'', ''{0,1 year -360 days -1 s}''', '22023 row 3 of partition 3: invalid delay: ''1 year -360 days -00:00:01''', 'has a delay that adds up to less than zero'),
        ('payloads, delays', '''{1,1}'', ''{null,300000 years -108000000 days}''', '22023 row 3 of partition 3: invalid delay: ''300000 years -108000000 days''', 'has a delay that compares as zero but spans thousands of years'),
        ('payloads, expires_in', '''{1,1}'', ''{null,-1 s}''', '22023 row 3 of partition 3: invalid expires_in: ''-00:00:01''', 'has a negative expires_in')
    ) w (columns, given, error, sentence);
    return next is((select count(*) from pgqueue.messages x where x.queue_name = queue), 4::bigint, queue || ': sink_commit of a run with an invalid row sends nothing');
    return next is((select count(*) from pgqueue.sink_commits c where c.app_id = 'bad'), 0::bigint, queue || ': sink_commit of a run with an invalid row records no commit');

    return next is(pg_temp.raised(format($f$
        do $d$ declare token uuid := pgqueue.sink_stage(%L, pg_temp.run(2), 3, 1); begin
            insert into pgqueue.staged_messages (token, row_number, payloads)
            values (token, 1, array['1', to_jsonb(repeat('x', 99))]);
        end $d$ $f$, queue)), format('PQ003 row 2 of partition 3: payload of 101 bytes is over the limit of 100 bytes of queue %L', queue), queue || ': a payload over the limit of the queue is refused when it is staged');
    run := gen_random_uuid();
    first := pg_temp.staged(queue, run, 0, 1, '{12345678901}');
    perform pgqueue.alter_queue(queue, max_payload_bytes => 10);
    return next is(pg_temp.raised(format('select pgqueue.sink_commit(%L, array[%L]::uuid[], ''{1}'', ''gone'', 1)', run, first)), format('PQ003 row 1 of partition 0: payload of 11 bytes is over the limit of 10 bytes of queue %L', queue), queue || ': sink_commit refuses a payload over a limit that was lowered after staging');
    perform pgqueue.alter_queue(queue, max_payload_bytes => 100);

    -- A paused queue and a dropped queue.
    run := gen_random_uuid();
    first := pg_temp.staged(queue, run, 0, 1, '{8}');
    perform pgqueue.pause_queue(queue);
    return next is(pgqueue.sink_commit(run, array[first], '{1}'), true, queue || ': sink_commit sends to a paused queue');
    run := gen_random_uuid();
    first := pg_temp.staged(queue, run, 0, 1, '{9}');
    perform pgqueue.drop_queue(queue);
    return next is(pg_temp.raised(format('select pgqueue.sink_commit(%L, array[%L]::uuid[], ''{1}'', ''gone'', 1)', run, first)), format('PQ001 queue %L does not exist', queue), queue || ': sink_commit raises an error if the queue was dropped after staging');
    return next is(pgqueue.sink_abort(run), 1::bigint, queue || ': sink_abort returns the number of messages staged for a dropped queue');
    return next is(pg_temp.left_over(run), '{0,0}', queue || ': sink_abort deletes all staged rows of the run');
end;
$$;
select pg_temp.sinks('sink', false);
select pg_temp.sinks('sink_dedicated', true);

-- Keys of deduplication.

create function pg_temp.staged_keys(queue text, run uuid, partition int, payloads jsonb[], keys text[], delays interval[] default null) returns uuid language plpgsql as $$
declare
    token uuid := pgqueue.sink_stage(queue, run, partition, 1);
begin
    -- The last row comes first: its messages are still the last ones.
    insert into pgqueue.staged_messages (token, row_number, payloads, dedup_keys, delays)
    select token, n, payloads[n:n + 1], keys[n:n + 1], delays[n:n + 1] from generate_series(cardinality(payloads) / 2 * 2 + 1, 1, -2) n
    where n <= cardinality(payloads);
    return token;
end;
$$;
-- Commits two messages with the keys x and y, and returns the error.
create function pg_temp.failed(queue text, payloads text, counts text, after text default 'null') returns text language sql as $$
    select pg_temp.raised(format($f$ do $d$ declare token uuid := pg_temp.staged_keys(%L, pg_temp.run(3), 3, %L, '{x,y}'); begin
        perform pgqueue.sink_commit(pg_temp.run(3), array[token], %L); %s; end $d$ $f$, queue, payloads, counts, after))
$$;
create function pg_temp.deduplicates(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    run uuid := gen_random_uuid();
    first uuid;
    second uuid;
    third uuid;
begin
    perform pgqueue.create_queue(queue, max_payload_bytes => 10, dedicated => has_table);
    perform pgqueue.enqueue(queue, '0', dedup_key => 'old');
    third := pg_temp.staged_keys(queue, run, 2, '{9,10,11,12}', array['c', 'old', 'b', repeat('ü', 255)]);
    second := pg_temp.staged(queue, run, 1, 5, '{6,7,8}');
    first := pg_temp.staged_keys(queue, run, 0, '{1,2,3,4,5}', '{b,a,b,null,a}');
    return next is(pgqueue.sink_commit(run, array[first, second, third], '{5,3,4}', 'keys-' || queue, 1), true, queue || ': sink_commit of messages with dedup_keys returns true');
    return next is(pg_temp.sent(queue), '{0,1,2,4,6,7,8,9,12}', queue || ': sink_commit sends the first message with each new dedup_key and all messages without one, in their order');
    return next is(pg_temp.left_over(run), '{0,0}', queue || ': sink_commit deletes staged messages whose dedup_key is taken');
    return next is((select s.enqueued_total from pgqueue.stats(queue) s), 9::bigint, queue || ': messages whose dedup_key is taken are not counted');
    return next is((select c.messages from pgqueue.sink_commits c where c.app_id = 'keys-' || queue and c.version = 1), 12::bigint, queue || ': sink_commits records the number of messages including those whose dedup_key is taken');
    return next is((select array_agg(pgqueue.enqueue(queue, '99', dedup_key => k.key) = m.id) from (values ('a', '2'::jsonb), ('b', '1'), ('c', '9')) k (key, payload) join pgqueue.messages m on m.queue_name = queue and m.payload = k.payload), '{t,t,t}',
        queue || ': a dedup_key belongs to the message that sink_commit has sent');
    return next is(pgqueue.sink_commit(run, array[first, second, third], '{5,3,4}', 'keys-' || queue, 1), false, queue || ': a second sink_commit of a run with dedup_keys returns false');

    -- The window.
    perform set_config('test.now', '2030-01-01 12:04:59.999999+00', true);
    run := gen_random_uuid();
    first := pg_temp.staged_keys(queue, run, 0, '{13,14}', '{a,b}');
    return next is(pgqueue.sink_commit(run, array[first], '{2}'), true, queue || ': sink_commit of messages whose dedup_keys are all taken returns true');
    return next is(cardinality(pg_temp.sent(queue)), 9, queue || ': sink_commit of messages whose dedup_keys are all taken sends nothing');
    perform set_config('test.now', '2030-01-01 12:05:00+00', true);
    run := gen_random_uuid();
    first := pg_temp.staged_keys(queue, run, 0, '{15,16,17}', '{a,b,a}');
    perform pgqueue.sink_commit(run, array[first], '{3}');
    return next is((pg_temp.sent(queue))[10:], '{15,16}', queue || ': sink_commit sends a message whose dedup_key is free since the dedup_window has ended');
    perform pgqueue.purge_queue(queue);
    perform pgqueue.claim(queue);

    -- Delayed messages.
    run := gen_random_uuid();
    first := pg_temp.staged_keys(queue, run, 0, '{1,2,3,4,5}', '{d,null,d,f,g}', '{1 h,1 h,1 day,0,1 h}');
    second := pg_temp.staged_keys(queue, run, 1, '{6,7}', '{f,d}');
    perform pgqueue.sink_commit(run, array[first, second], '{5,2}');
    return next is(row(pg_temp.sent(queue), (select array_agg(x.payload order by x.id) from pgqueue.scheduled_messages x where x.queue_name = queue))::text, row('{4}'::jsonb[], '{1,2,5}'::jsonb[])::text, queue || ': sink_commit sends due and delayed messages with new dedup_keys');
    return next is((select array_agg(x.due_at - pgqueue._now() order by x.id) from pgqueue.scheduled_messages x where x.queue_name = queue), '{1 h,1 h 0.000001 s,1 h 0.000002 s}'::interval[], queue || ': delayed messages with dedup_keys have distinct due times');
    return next is((select pgqueue._from_micros(pg_sequence_last_value(q.first_due_at)) from pgqueue.queues q where q.name = queue), pgqueue._now() + interval '1 h', queue || ': sink_commit of delayed messages with dedup_keys sets the register first_due_at');

    -- A rollback, and commits that fail, take no key.
    return next is(pg_temp.failed(queue, '{1,2}', '{2}', 'raise sqlstate ''XX001'' using message = ''rolled back'''), 'XX001 rolled back', queue || ': a transaction with a sink_commit of dedup_keys is rolled back');
    return next alike(pg_temp.failed(queue, '{1,12345678901}', '{2}'), 'PQ003 row 2 of partition 3: payload of 11 bytes%', queue || ': sink_commit refuses a payload over the limit beside dedup_keys');
    return next alike(pg_temp.failed(queue, '{1,2}', '{3}'), 'PQ010 % has 2 staged messages in partition 3, not %', queue || ': sink_commit refuses a count that is too high for messages with dedup_keys');
    return next alike(pg_temp.failed(queue, '{1,2}', '{1}'), 'PQ010 % has 2 staged messages in partition 3, not %', queue || ': sink_commit refuses a count that is too low for messages with dedup_keys');
    run := gen_random_uuid();
    first := pg_temp.staged_keys(queue, run, 0, '{18,19}', '{x,y}');
    perform pgqueue.sink_commit(run, array[first], '{2}');
    return next is(pg_temp.sent(queue), '{4,18,19}', queue || ': the dedup_keys of commits that failed or were rolled back are free');

    -- A key that is taken as long as its message lives.
    perform pgqueue.alter_queue(queue, dedup_window => '0');
    for n in 1..2 loop
        perform pgqueue.purge_queue(queue);
        run := gen_random_uuid();
        first := pg_temp.staged_keys(queue, run, 0, '{20,21,22}', '{z,z,null}');
        perform pgqueue.sink_commit(run, array[first], '{3}');
    end loop;
    return next is(pg_temp.sent(queue), '{20,22}', queue || ': with a dedup_window of 0, sink_commit sends a message whose dedup_key is free since its message is gone');
    perform set_config('test.now', '2030-01-01 12:00:00+00', true);
end;
$$;
select pg_temp.deduplicates('sink-keys', false);
select pg_temp.deduplicates('sink-keys-2', true);

select pgqueue.create_queue('sink-keys-3') is not null as made \gset
select pg_temp.staged_keys('sink-keys', pg_temp.run(4), 0, '{1,2}', '{q,r}') as one, pg_temp.staged_keys('sink-keys-3', pg_temp.run(4), 0, '{1,2,3}', '{q,r,r}') as other,
    pg_temp.staged('sink-keys-2', pg_temp.run(4), 0, 1, '{1,2}') as plain \gset
select pgqueue.purge_queue(q) from unnest('{sink-keys,sink-keys-2}'::text[]) q \g /dev/null
select pgqueue.sink_commit(pg_temp.run(4), array[:'other', :'plain', :'one']::uuid[], '{3,2,2}') as sent \gset
select is(array[pg_temp.sent('sink-keys')::text, pg_temp.sent('sink-keys-2')::text, pg_temp.sent('sink-keys-3')::text], array['{1,2}', '{1,2}', '{1,2}'], 'each queue of a commit has dedup_keys of its own');
select pg_temp.staged_keys('sink-keys', pg_temp.run(5), 0, '{1,2}', '{null,null}') as token \gset
select is((select row(s.messages, s.dedup_keys)::text from pgqueue.staged_messages s where s.token = :'token'), '(2,)', 'a row of messages without dedup_keys is stored without the array');
select pgqueue.sink_abort(pg_temp.run(5)) as aborted \gset

-- Arguments.
select pgqueue.create_queue('sink') is not null as made \gset
select is(pg_temp.raised('select ' || w.call), w.error, w.sentence)
from (values
    ('pgqueue.sink_stage(''nowhere'', pg_temp.run(1), 0, 0)', 'PQ001 queue ''nowhere'' does not exist', 'sink_stage refuses an unknown queue'),
    ('pgqueue.sink_stage(null, pg_temp.run(1), 0, 0)', 'PQ001 queue null does not exist', 'sink_stage refuses a null queue'),
    ('pgqueue.sink_stage(''sink'', null, 0, 0)', '22023 invalid run: null', 'sink_stage refuses a null run'),
    ('pgqueue.sink_stage(''sink'', pg_temp.run(1), null, 0)', '22023 invalid partition: null', 'sink_stage refuses a null partition'),
    ('pgqueue.sink_stage(''sink'', pg_temp.run(1), 0, null)', '22023 invalid attempt: null', 'sink_stage refuses a null attempt'),
    ('pgqueue.sink_commit(null, ''{}'', ''{}'')', '22023 invalid run: null', 'sink_commit refuses a null run'),
    ('pgqueue.sink_commit(pg_temp.run(1), null, ''{}'')', '22023 invalid tokens: null', 'sink_commit refuses null tokens'),
    ('pgqueue.sink_commit(pg_temp.run(1), array[pg_temp.run(9), pg_temp.run(9)], ''{1,1}'')', format('22023 invalid tokens: ''{%s,%s}''', pg_temp.run(9), pg_temp.run(9)), 'sink_commit refuses a token that is given twice'),
    ('pgqueue.sink_commit(pg_temp.run(1), array[null]::uuid[], ''{1}'')', '22023 invalid tokens: ''{NULL}''', 'sink_commit refuses a null token'),
    ('pgqueue.sink_commit(pg_temp.run(1), array[pg_temp.run(9)], ''{1,1}'')', '22023 invalid counts: ''{1,1}''', 'sink_commit refuses more counts than tokens'),
    ('pgqueue.sink_commit(pg_temp.run(1), array[pg_temp.run(9)], ''{-1}'')', '22023 invalid counts: ''{-1}''', 'sink_commit refuses a negative count'),
    ('pgqueue.sink_commit(pg_temp.run(1), array[pg_temp.run(9)], null)', '22023 invalid counts: null', 'sink_commit refuses null counts'),
    ('pgqueue.sink_commit(pg_temp.run(1), ''{}'', ''{}'', ''a'')', '22023 invalid version: null', 'sink_commit refuses an app_id without a version'),
    ('pgqueue.sink_commit(pg_temp.run(1), ''{}'', ''{}'', null, 1)', '22023 invalid version: ''1''', 'sink_commit refuses a version without an app_id'),
    ('pgqueue.sink_commit(pg_temp.run(1), ''{}'', ''{}'', '''', 1)', '22023 invalid app_id: ''''', 'sink_commit refuses an empty app_id'),
    ('pgqueue.sink_abort(null)', '22023 invalid run: null', 'sink_abort refuses a null run'),
    ('pgqueue.sweep_staged(''-1 s'')', '22023 invalid older_than: ''-00:00:01''', 'sweep_staged refuses a negative older_than'),
    ('pgqueue.sweep_staged(forget_after => ''11 years'')', '22023 invalid forget_after: ''11 years''', 'sweep_staged refuses a forget_after over 10 years')
) w (call, error, sentence);

-- Missing and surplus messages.
select pg_temp.staged('sink', pg_temp.run(10), 4, 1, '{1,2,3}') as token \gset
select is(pg_temp.raised(format('select pgqueue.sink_commit(%L, array[%L]::uuid[], ''{4}'', ''lost'', 1)', pg_temp.run(10), :'token')),
    format('PQ010 run %s has 3 staged messages in partition 4, not 4', pg_temp.run(10)), 'sink_commit refuses a count that is higher than the number of staged messages');
select is(pg_temp.raised(format('select pgqueue.sink_commit(%L, array[%L]::uuid[], ''{2}'', ''lost'', 1)', pg_temp.run(10), :'token')),
    format('PQ010 run %s has 3 staged messages in partition 4, not 2', pg_temp.run(10)), 'sink_commit refuses a count that is lower than the number of staged messages');
select pgqueue.sink_stage('sink', pg_temp.run(12), 4, 1) as delayed \gset
insert into pgqueue.staged_messages (token, row_number, payloads, delays) values (:'delayed', 1, '{1,2,3}', '{0,1 h,0}');
select is(pg_temp.raised(format('select pgqueue.sink_commit(%L, array[%L]::uuid[], ''{2}'', ''lost'', 1)', pg_temp.run(12), :'delayed')),
    format('PQ010 run %s has 3 staged messages in partition 4, not 2', pg_temp.run(12)), 'sink_commit refuses a count that is lower than the number of staged messages if some are delayed');
select is(pgqueue.sink_abort(pg_temp.run(12)), 3::bigint, 'a refused sink_commit leaves all staged messages, including delayed ones');
select is(pg_temp.raised(format('select pgqueue.sink_commit(%L, array[%L, %L]::uuid[], ''{3,1}'', ''lost'', 1)', pg_temp.run(10), :'token', pg_temp.run(99))),
    format('PQ010 run %s has 0 staged messages in an unknown partition, not 1', pg_temp.run(10)), 'sink_commit refuses an unknown token');
select is(pg_temp.raised(format('select pgqueue.sink_commit(%L, array[%L]::uuid[], ''{3}'', ''lost'', 1)', pg_temp.run(11), :'token')),
    format('PQ010 run %s has 0 staged messages in an unknown partition, not 3', pg_temp.run(11)), 'sink_commit refuses a token of another run');
select pg_temp.staged('sink', pg_temp.run(10), 5, 1, '{4}') as later \gset
select is(pg_temp.raised(format('select pgqueue.sink_commit(%L, array[%L, %L]::uuid[], ''{2,2}'', ''lost'', 1)', pg_temp.run(10), :'later', :'token')),
    format('PQ010 run %s has 1 staged message in partition 5, not 2', pg_temp.run(10)), 'sink_commit names the first of several tokens whose count is wrong');
delete from pgqueue.staged_attempts a where a.token = :'later';
delete from pgqueue.staged_messages s where s.token = :'later';
select is(row(pg_temp.sent('sink'), pg_temp.left_over(pg_temp.run(10)))::text, row('{}'::jsonb[], '{1,3}'::bigint[])::text, 'a refused sink_commit sends nothing and deletes nothing');
select is(pgqueue.sink_commit(pg_temp.run(10), array[:'token']::uuid[], '{3}', 'lost', 1), true, 'sink_commit with the right count returns true after refused calls for the same version');

-- Rows staged by another role.
create role pgqueue_test_sink_alice;
create role pgqueue_test_sink_bob;
select pgqueue.grant_access('pgqueue_test_sink_alice', 'producer'), pgqueue.grant_access('pgqueue_test_sink_bob', 'producer') \gset
set local session authorization pgqueue_test_sink_alice;
select pgqueue.sink_stage('sink', pg_temp.run(20), 0, 1) as alices \gset
insert into pgqueue.staged_messages (token, row_number, payloads) values (:'alices', 1, '{"\"alice\""}');
set local session authorization pgqueue_test_sink_bob;
select is(pg_temp.raised(format('select pgqueue.sink_commit(%L, array[%L]::uuid[], ''{1}'', ''bob'', 1)', pg_temp.run(20), :'alices')),
    format('PQ010 run %s has 0 staged messages in an unknown partition, not 1', pg_temp.run(20)), 'sink_commit refuses a token of another role');
select is(pgqueue.sink_abort(pg_temp.run(20)), 0::bigint, 'sink_abort does not delete rows that another role staged');
select is(pg_temp.raised(w.statement), '42501 permission denied for table ' || w.name, w.sentence)
from (values
    ('select from pgqueue.staged_messages', 'staged_messages', 'a producer may not read staged_messages'),
    ('update pgqueue.staged_messages set payloads = null', 'staged_messages', 'a producer may not update staged_messages'),
    ('delete from pgqueue.staged_messages', 'staged_messages', 'a producer may not delete from staged_messages'),
    ('insert into pgqueue.staged_messages (token, row_number) values (gen_random_uuid(), 1) returning token', 'staged_messages', 'a producer may not read back the rows that it inserts into staged_messages'),
    ('select from pgqueue.staged_attempts', 'staged_attempts', 'a producer may not read staged_attempts'),
    ('insert into pgqueue.staged_attempts (token, run, partition, attempt, queue_name, staged_by, staged_at) values (gen_random_uuid(), gen_random_uuid(), 0, 0, ''sink'', ''postgres'', now())', 'staged_attempts', 'a producer may not insert into staged_attempts for another role'),
    ('select from pgqueue.sink_commits', 'sink_commits', 'a producer may not read sink_commits'),
    ('delete from pgqueue.sink_commits', 'sink_commits', 'a producer may not delete from sink_commits')
) w (statement, name, sentence);
set local session authorization pgqueue_test_sink_alice;
select is(pgqueue.sink_commit(pg_temp.run(20), array[:'alices']::uuid[], '{1}', 'alice', 1), true, 'a producer commits what it staged itself');
set local session authorization pgqueue_test_sink_bob;
select pgqueue.sink_stage('sink', pg_temp.run(21), 0, 1) as bobs \gset
insert into pgqueue.staged_messages (token, row_number, payloads) values (:'bobs', 1, '{"\"bob\""}');
select is(pg_temp.raised(format('select pgqueue.sink_commit(%L, array[%L]::uuid[], ''{1}'', ''alice'', 1)', pg_temp.run(21), :'bobs')), '22023 invalid app_id: ''alice''', 'sink_commit refuses an app_id and version that another role committed');
reset session authorization;
select is(pg_temp.sent('sink'), array['1', '2', '3', '"alice"']::jsonb[], 'the message of alice was sent and the message of bob was not');
select is(pg_temp.left_over(pg_temp.run(21)), '{1,1}', 'the message of bob is still staged after the refused commit');

-- sweep_staged.
delete from pgqueue.staged_attempts;
delete from pgqueue.staged_messages;
delete from pgqueue.sink_commits;
select pg_temp.staged('sink', pg_temp.run(30), 0, 1, '{1,2}') as old \gset
insert into pgqueue.staged_messages (token, row_number, payloads) values (pg_temp.run(98), 1, '{1}');
select is((select count(*) from pgqueue.doctor() d where d.finding = 'stale_staging'), 0::bigint, 'doctor does not report a run that was staged just now');
set local test.now = '2030-01-02 12:00:00+00';
select pg_temp.staged('sink', pg_temp.run(31), 0, 1, '{3}') as young \gset
select is((select row(d.severity, d.detail, d.repair)::text from pgqueue.doctor() d where d.finding = 'stale_staging'),
    row('warning', format('never committed: 1 attempt of 1 run, staged by %s and up to 1 day old; the driver of each run died', session_user), 'select pgqueue.sweep_staged();')::text, 'doctor reports a run that was staged a day ago and not committed');
select is(pgqueue.sweep_staged('25 h'), 1::bigint, 'sweep_staged deletes rows whose token was never returned by sink_stage');
select is(pgqueue.sweep_staged(), 2::bigint, 'sweep_staged deletes messages that were staged a day ago');
select is(pg_temp.left_over(pg_temp.run(30)) || pg_temp.left_over(pg_temp.run(31)), '{0,0,1,1}', 'sweep_staged leaves rows of younger runs');
select is(pg_temp.raised(format('select pgqueue.sink_commit(%L, array[%L]::uuid[], ''{2}'')', pg_temp.run(30), :'old')), format('PQ010 run %s has 0 staged messages in an unknown partition, not 2', pg_temp.run(30)), 'sink_commit of a run that sweep_staged deleted raises an error');
select is(pg_temp.raised(format('insert into pgqueue.staged_messages (token, row_number, payloads) values (%L, 1, array[null]::jsonb[])', pg_temp.run(30))), '22023 row 1 of partition unknown: invalid payload: null', 'staging an invalid row under a deleted token raises the error for the invalid row');

-- Deleting old rows of sink_commits.
select pgqueue.sink_commit(pg_temp.run(40 + v), '{}', '{}', 'app', v) from unnest(array[1, 2, 4, 5]) v;
select pgqueue.sink_commit(pg_temp.run(50), '{}', '{}');
set local test.now = '2030-04-02 12:00:00+00';
select pgqueue.sink_commit(pg_temp.run(47), '{}', '{}', 'app', 3), pgqueue.sink_commit(pg_temp.run(48), '{}', '{}', 'app', 7);
select pgqueue.sweep_staged('10 years') as swept \gset
select is((select array_agg(row(c.app_id, c.version, c.forgotten_version)::text order by c.app_id, c.version) from pgqueue.sink_commits c), array['(app,3,)', '(app,7,5)'], 'sweep_staged deletes commits older than 90 days, except the highest version of an app_id');
select is(pgqueue.sink_commit(pg_temp.run(60), '{}', '{}', 'app', 7), false, 'sink_commit of a version that is still recorded returns false');
select is(pg_temp.raised(format('select pgqueue.sink_commit(%L, ''{}'', ''{}'', ''app'', 5)', pg_temp.run(60))), '22023 invalid version: ''5''', 'sink_commit refuses a version that was deleted from sink_commits');
select is(pgqueue.sink_commit(pg_temp.run(60), '{}', '{}', 'app', 6), true, 'sink_commit of a version between deleted and recorded ones returns true');
delete from pgqueue.sink_commits c where c.version = 6;
select pgqueue.sweep_staged(forget_after => '0') as swept \gset
select is((select array_agg(row(c.app_id, c.version, c.forgotten_version)::text) from pgqueue.sink_commits c), array['(app,7,5)'], 'sweep_staged always keeps the highest version of an app_id and its forgotten_version');
select pgqueue.sink_commit(pg_temp.run(61), '{}', '{}', 'app', 8), pgqueue.sweep_staged(forget_after => '0') \gset
select is((select array_agg(row(c.app_id, c.version, c.forgotten_version)::text) from pgqueue.sink_commits c), array['(app,8,7)'], 'sweep_staged carries forgotten_version over to the next version');

-- Costs.
insert into pgqueue.sink_commits (app_id, version, run, messages, committed_by, committed_at)
select 'app', 8 + n, gen_random_uuid(), 1, session_user, pgqueue._now() from generate_series(1, 20000) n;
create function pg_temp.pages(statement text) returns int language plpgsql as $$
declare
    plan json;
begin
    execute 'explain (analyze, buffers, timing off, format json) ' || statement into plan;
    return (plan -> 0 -> 'Plan' ->> 'Shared Hit Blocks')::int + (plan -> 0 -> 'Plan' ->> 'Shared Read Blocks')::int;
end;
$$;
select cmp_ok(min(pg_temp.pages(format('select pgqueue.sink_commit(%L, ''{}'', ''{}'', ''app'', %s)', pg_temp.run(70), 30000 + n))), '<', 100, 'a commit does not read the earlier commits of its app_id')
from generate_series(1, 3) n;

select * from finish();
rollback;
