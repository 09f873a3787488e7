begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';

select plan(141);

-- What a call raises: code and message.
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
-- Stage payloads as one attempt at a partition.
create function pg_temp.staged(queue text, run uuid, partition int, attempt bigint, payloads jsonb[]) returns uuid language plpgsql as $$
declare
    token uuid := pgqueue.sink_stage(queue, run, partition, attempt);
begin
    insert into pgqueue.staged_messages (token, row_number, payloads) select token, p.n, p.two from (values (1, payloads[:2]), (3, payloads[3:])) p (n, two) where p.two <> '{}';
    return token;
end;
$$;
-- In PL/pgSQL: up to PostgreSQL 17 a function in SQL goes on with a plan from before a table was attached.
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

    -- One run, of three partitions and an attempt too many.
    first := pg_temp.staged(queue, run, 0, 10, '{1,2}');
    loser := pg_temp.staged(queue, run, 1, 11, '{30,40}');
    second := pg_temp.staged(queue, run, 1, 12, '{3,4}');
    third := pg_temp.staged(queue, run, 2, 13, '{}');
    return next is(pg_temp.sent(queue), '{}', queue || ': what is staged is not there yet');
    return next is((select count(*) from pgqueue.claim(queue, 10)), 0::bigint, queue || ': and cannot be claimed');
    return next is(pgqueue.sink_commit(run, array[first, second, third], '{2,2,0}', 'app-' || queue, 1), true, queue || ': a commit says that it was done');
    return next is(pg_temp.sent(queue), '{1,2,3,4}', queue || ': a commit sends what the winners staged, in the order of their rows');
    return next is(pg_temp.left_over(run), '{0,0}', queue || ': and discards the rest of the run');
    select * into m from pgqueue.messages where messages.queue_name = queue order by id limit 1;
    return next is(row(m.max_attempts, m.attempt_count, m.enqueued_at, m.visible_at, m.expires_at, m.claim_token, m.body, m.headers)::text,
        row(7, 0, pgqueue._now(), pgqueue._now(), null::timestamptz, null::uuid, null::bytea, null::jsonb)::text, queue || ': a message has what enqueue would give it');
    return next is((select row(c.run, c.messages, c.committed_by, c.committed_at)::text from pgqueue.sink_commits c where c.app_id = 'app-' || queue and c.version = 1),
        row(run, 4, session_user, pgqueue._now())::text, queue || ': the ledger says what was committed');

    -- The same again.
    first := pg_temp.staged(queue, again, 0, 20, '{1,2,3,4}');
    return next is(pgqueue.sink_commit(again, array[first], '{4}', 'app-' || queue, 1), false, queue || ': the same version again is discarded, and the commit says so');
    return next is(row(pg_temp.sent(queue), pg_temp.left_over(again))::text, row('{1,2,3,4}'::jsonb[], '{0,0}'::bigint[])::text, queue || ': nothing was sent, and nothing is left');
    return next is(pgqueue.sink_commit(run, array[second], '{2}', 'app-' || queue, 1), false, queue || ': a call whose answer was lost can be repeated');
    first := pg_temp.staged(queue, again, 0, 20, '{5}');
    return next is(pgqueue.sink_commit(again, array[first], '{1}', 'app-' || queue, 0), true, queue || ': a lower version is another one');
    first := pg_temp.staged(queue, again, 0, 20, '{6}');
    return next is(pgqueue.sink_commit(again, array[first], '{1}', 'other-' || queue, 1), true, queue || ': and so is that of another app_id');
    return next is(pg_temp.sent(queue), '{1,2,3,4,5,6}', queue || ': both were sent');

    -- Without an app_id.
    run := gen_random_uuid();
    first := pg_temp.staged(queue, run, 0, 1, '{7}');
    return next is(pgqueue.sink_commit(run, array[first], '{1}'), true, queue || ': a run needs no app_id');
    return next is(pgqueue.sink_commit(run, array[first], '{1}'), false, queue || ': it is known by its id then');
    return next is(pgqueue.sink_commit(gen_random_uuid(), '{}', '{}', 'app-' || queue, 7), true, queue || ': a commit of nothing is one');
    return next is(pg_temp.sent(queue), '{1,2,3,4,5,6,7}', queue || ': and sends nothing');
    perform pgqueue.purge_queue(queue);

    -- Every column.
    run := gen_random_uuid();
    first := pgqueue.sink_stage(queue, run, 0, 1);
    insert into pgqueue.staged_messages (token, row_number, payloads, bodies, headers, message_ids, delays, expires_in) values
    (first, 3, array['"sooner"', 'null']::jsonb[], null, null, null, '{1 h,null}', null),
    (first, 1, array[null, '"later"']::jsonb[], '{"\\x00ff",null}', array['{"a": 1}', null]::jsonb[], array[pg_temp.run(1), null], '{0,1 day}', '{1 h,36 h}');
    return next is(pgqueue.sink_commit(run, array[first], '{4}'), true, queue || ': a run may mix what is due and what is delayed');
    return next is((select array_agg(row(x.payload, x.body, x.headers, x.message_id, x.expires_at)::text order by x.id) from pgqueue.messages x where x.queue_name = queue),
        array[row(null::jsonb, '\x00ff'::bytea, '{"a": 1}'::jsonb, pg_temp.run(1), pgqueue._now() + interval '1 h')::text, row('null'::jsonb, null::bytea, null::jsonb, null::uuid, null::timestamptz)::text],
        queue || ': body, headers, message_id and time to live arrive');
    return next is((select array_agg(row(x.payload, x.due_at - pgqueue._now(), x.expires_at - pgqueue._now(), x.max_attempts)::text order by x.due_at) from pgqueue.scheduled_messages x where x.queue_name = queue),
        array[row('"sooner"'::jsonb, interval '1 h', null::interval, 7)::text, row('"later"'::jsonb, interval '1 day', interval '1 day 12 h', 7)::text], queue || ': what is delayed is scheduled, from the commit on');
    return next is((select pgqueue._from_micros(pg_sequence_last_value(q.first_due_at)) from pgqueue.queues q where q.name = queue), pgqueue._now() + interval '1 h', queue || ': claims look for it when the first comes due');

    run := gen_random_uuid();
    first := pgqueue.sink_stage(queue, run, 0, 1);
    insert into pgqueue.staged_messages (token, row_number, payloads, delays) values
    (first, 4, '{4,5}', '{1 h,1 day}'), (first, 1, '{1,2,3}', '{1 h,1 day,1 h}');
    perform pgqueue.sink_commit(run, array[first], '{5}');
    return next is((select array_agg(row(x.payload, x.due_at - pgqueue._now())::text order by x.id) from pgqueue.scheduled_messages x where x.queue_name = queue and jsonb_typeof(x.payload) = 'number'),
        array(select row(d.n::text::jsonb, d.due)::text from (values (1, interval '1 h'), (2, '1 day'), (3, '1 h 0.000001 s'), (4, '1 h 0.000002 s'), (5, '1 day 0.000001 s')) d (n, due)),
        queue || ': no two come due at the same moment, from which claims would go on');

    -- As large as may be.
    run := gen_random_uuid();
    first := pgqueue.sink_stage(queue, run, 0, 1);
    insert into pgqueue.staged_messages (token, row_number, payloads, bodies, headers, delays) values
    (first, 1, array[to_jsonb(repeat('x', 98)), null], array[null, convert_to(repeat('x', 100), 'utf8')], array[null, jsonb_build_object('a', repeat('x', 65527))], '{0,0}'),
    (first, 3, array[to_jsonb(repeat('x', 98))], null, null, '{10 years}');
    return next is(pgqueue.sink_commit(run, array[first], '{3}'), true, queue || ': payload, body, headers and delay reach their limits');

    -- What is wrong with a row.
    return query select is(pg_temp.raised(format($f$
        do $d$ declare token uuid := pgqueue.sink_stage(%1$L, pg_temp.run(2), 3, 1); begin
            insert into pgqueue.staged_messages (token, row_number, payloads) values (token, 1, '{1}');
            insert into pgqueue.staged_messages (token, row_number, %2$s) values (token, 2, %3$s);
            perform pgqueue.sink_commit(pg_temp.run(2), array[token], '{3}', 'bad', 1);
        end $d$ $f$, queue, w.columns, w.given)), w.error, queue || ': row 3 ' || w.sentence)
    from (values
        ('payloads', 'array[''1'', null]::jsonb[]', '22023 row 3 of partition 3: invalid payload: null', 'has neither payload nor body'),
        ('payloads, message_ids', '''{1}'', array[null, pg_temp.run(1)]', '22023 row 3 of partition 3: invalid payload: null', 'has nothing but a name'),
        ('payloads, bodies', '''{1,1}'', array[null, ''1'']::bytea[]', '22023 row 3 of partition 3: invalid payload: ''1''', 'has both'),
        ('payloads', 'array[''1'', to_jsonb(repeat(''x'', 99))]', format('PQ003 row 3 of partition 3: payload of 101 bytes is over the limit of 100 bytes of queue %L', queue), 'is too large, as JSON text'),
        ('payloads, delays', 'array[''1'', to_jsonb(repeat(''x'', 99))], ''{1 h,1 h}''', format('PQ003 row 3 of partition 3: payload of 101 bytes is over the limit of 100 bytes of queue %L', queue), 'is too large, though it is delayed'),
        ('payloads', '''{1,1e200}''', format('PQ003 row 3 of partition 3: payload of 201 bytes is over the limit of 100 bytes of queue %L', queue), 'is small only as it is stored'),
        ('payloads, messages, largest_bytes', '''{1,1e200}'', 2, 1', format('PQ003 row 3 of partition 3: payload of 201 bytes is over the limit of 100 bytes of queue %L', queue), 'is said to be small'),
        ('bodies', 'array[''1'', convert_to(repeat(''x'', 101), ''utf8'')]', format('PQ003 row 3 of partition 3: body of 101 bytes is over the limit of 100 bytes of queue %L', queue), 'has a body that is too large'),
        ('payloads, headers', '''{1,1}'', array[null, ''[1]'']::jsonb[]', '22023 row 3 of partition 3: invalid headers: ''[1]''', 'has headers that are no object'),
        ('payloads, headers', '''{1,1}'', array[null, jsonb_build_object(''a'', repeat(''x'', 65528))]', format('PQ003 row 3 of partition 3: headers of 65537 bytes is over the limit of 65536 bytes of queue %L', queue), 'has headers that are too large'),
        ('payloads, delays', '''{1,1}'', ''{0,-1 s}''', '22023 row 3 of partition 3: invalid delay: ''-00:00:01''', 'is delayed into the past'),
        ('payloads, delays', '''{1,1}'', ''{0,11 years}''', '22023 row 3 of partition 3: invalid delay: ''11 years''', 'is delayed beyond 10 years'),
        ('payloads, delays', '''{1,1}'', ''{0,1 year -360 days -1 s}''', '22023 row 3 of partition 3: invalid delay: ''1 year -360 days -00:00:01''', 'is delayed by no time at all'),
        ('payloads, delays', '''{1,1}'', ''{null,300000 years -108000000 days}''', '22023 row 3 of partition 3: invalid delay: ''300000 years -108000000 days''', 'has a delay that is equal to none and is one'),
        ('payloads, expires_in', '''{1,1}'', ''{null,-1 s}''', '22023 row 3 of partition 3: invalid expires_in: ''-00:00:01''', 'has expired before it is sent')
    ) w (columns, given, error, sentence);
    return next is((select count(*) from pgqueue.messages x where x.queue_name = queue), 4::bigint, queue || ': nothing of such a run is sent');
    return next is((select count(*) from pgqueue.sink_commits c where c.app_id = 'bad'), 0::bigint, queue || ': and the ledger does not know it');

    -- A queue that takes, and one that is gone.
    run := gen_random_uuid();
    first := pg_temp.staged(queue, run, 0, 1, '{8}');
    perform pgqueue.pause_queue(queue);
    return next is(pgqueue.sink_commit(run, array[first], '{1}'), true, queue || ': a queue that is paused takes messages');
    run := gen_random_uuid();
    first := pg_temp.staged(queue, run, 0, 1, '{9}');
    perform pgqueue.drop_queue(queue);
    return next is(pg_temp.raised(format('select pgqueue.sink_commit(%L, array[%L]::uuid[], ''{1}'', ''gone'', 1)', run, first)), format('PQ001 queue %L does not exist', queue), queue || ': a queue that was dropped meanwhile takes none');
    return next is(pgqueue.sink_abort(run), 1::bigint, queue || ': what was staged for it can be discarded');
    return next is(pg_temp.left_over(run), '{0,0}', queue || ': and is gone then');
end;
$$;
select pg_temp.sinks('sink', false);
select pg_temp.sinks('sink_dedicated', true);

-- Arguments.
select pgqueue.create_queue('sink') is not null as made \gset
select is(pg_temp.raised('select ' || w.call), w.error, w.sentence)
from (values
    ('pgqueue.sink_stage(''nowhere'', pg_temp.run(1), 0, 0)', 'PQ001 queue ''nowhere'' does not exist', 'nothing is staged for an unknown queue'),
    ('pgqueue.sink_stage(null, pg_temp.run(1), 0, 0)', 'PQ001 queue null does not exist', 'nor for none'),
    ('pgqueue.sink_stage(''sink'', null, 0, 0)', '22023 invalid run: null', 'a run has an id'),
    ('pgqueue.sink_stage(''sink'', pg_temp.run(1), null, 0)', '22023 invalid partition: null', 'a partition has a number'),
    ('pgqueue.sink_stage(''sink'', pg_temp.run(1), 0, null)', '22023 invalid attempt: null', 'and so has an attempt'),
    ('pgqueue.sink_commit(null, ''{}'', ''{}'')', '22023 invalid run: null', 'what is committed is a run'),
    ('pgqueue.sink_commit(pg_temp.run(1), null, ''{}'')', '22023 invalid tokens: null', 'winners are named'),
    ('pgqueue.sink_commit(pg_temp.run(1), array[pg_temp.run(9), pg_temp.run(9)], ''{1,1}'')', format('22023 invalid tokens: ''{%s,%s}''', pg_temp.run(9), pg_temp.run(9)), 'each once'),
    ('pgqueue.sink_commit(pg_temp.run(1), array[null]::uuid[], ''{1}'')', '22023 invalid tokens: ''{NULL}''', 'and none is null'),
    ('pgqueue.sink_commit(pg_temp.run(1), array[pg_temp.run(9)], ''{1,1}'')', '22023 invalid counts: ''{1,1}''', 'each has a count'),
    ('pgqueue.sink_commit(pg_temp.run(1), array[pg_temp.run(9)], ''{-1}'')', '22023 invalid counts: ''{-1}''', 'which is not negative'),
    ('pgqueue.sink_commit(pg_temp.run(1), array[pg_temp.run(9)], null)', '22023 invalid counts: null', 'nor null'),
    ('pgqueue.sink_commit(pg_temp.run(1), ''{}'', ''{}'', ''a'')', '22023 invalid version: null', 'an app_id has a version'),
    ('pgqueue.sink_commit(pg_temp.run(1), ''{}'', ''{}'', null, 1)', '22023 invalid version: ''1''', 'and a version an app_id'),
    ('pgqueue.sink_commit(pg_temp.run(1), ''{}'', ''{}'', '''', 1)', '22023 invalid app_id: ''''', 'that is not empty'),
    ('pgqueue.sink_abort(null)', '22023 invalid run: null', 'what is discarded is a run'),
    ('pgqueue.sweep_staged(''-1 s'')', '22023 invalid older_than: ''-00:00:01''', 'a sweep looks back'),
    ('pgqueue.sweep_staged(forget_after => ''11 years'')', '22023 invalid forget_after: ''11 years''', 'and not too far')
) w (call, error, sentence);

-- What is missing, or too many.
select pg_temp.staged('sink', pg_temp.run(10), 4, 1, '{1,2,3}') as token \gset
select is(pg_temp.raised(format('select pgqueue.sink_commit(%L, array[%L]::uuid[], ''{4}'', ''lost'', 1)', pg_temp.run(10), :'token')),
    format('PQ010 run %s staged 4 messages in partition 4, and 3 are there', pg_temp.run(10)), 'a count that is short stops the commit');
select is(pg_temp.raised(format('select pgqueue.sink_commit(%L, array[%L]::uuid[], ''{2}'', ''lost'', 1)', pg_temp.run(10), :'token')),
    format('PQ010 run %s staged 2 messages in partition 4, and 3 are there', pg_temp.run(10)), 'and so does one that is exceeded');
select pgqueue.sink_stage('sink', pg_temp.run(12), 4, 1) as delayed \gset
insert into pgqueue.staged_messages (token, row_number, payloads, delays) values (:'delayed', 1, '{1,2,3}', '{0,1 h,0}');
select is(pg_temp.raised(format('select pgqueue.sink_commit(%L, array[%L]::uuid[], ''{2}'', ''lost'', 1)', pg_temp.run(12), :'delayed')),
    format('PQ010 run %s staged 2 messages in partition 4, and 3 are there', pg_temp.run(12)), 'also where those too many are delayed');
select is(pgqueue.sink_abort(pg_temp.run(12)), 3::bigint, 'of which none was sent, and none is lost');
select is(pg_temp.raised(format('select pgqueue.sink_commit(%L, array[%L, %L]::uuid[], ''{3,1}'', ''lost'', 1)', pg_temp.run(10), :'token', pg_temp.run(99))),
    format('PQ010 run %s staged 1 messages in partition unknown, and 0 are there', pg_temp.run(10)), 'and so does a token that nobody was given');
select is(pg_temp.raised(format('select pgqueue.sink_commit(%L, array[%L]::uuid[], ''{3}'', ''lost'', 1)', pg_temp.run(11), :'token')),
    format('PQ010 run %s staged 3 messages in partition unknown, and 0 are there', pg_temp.run(11)), 'and one of another run');
select is(row(pg_temp.sent('sink'), pg_temp.left_over(pg_temp.run(10)))::text, row('{}'::jsonb[], '{1,3}'::bigint[])::text, 'nothing was sent, nothing was discarded');
select is(pgqueue.sink_commit(pg_temp.run(10), array[:'token']::uuid[], '{3}', 'lost', 1), true, 'the right count can still be committed under the same version');

-- Of a stranger.
create role pgqueue_test_sink_alice;
create role pgqueue_test_sink_bob;
select pgqueue.grant_access('pgqueue_test_sink_alice', 'producer'), pgqueue.grant_access('pgqueue_test_sink_bob', 'producer') \gset
set local session authorization pgqueue_test_sink_alice;
select pgqueue.sink_stage('sink', pg_temp.run(20), 0, 1) as alices \gset
insert into pgqueue.staged_messages (token, row_number, payloads) values (:'alices', 1, '{"\"alice\""}');
set local session authorization pgqueue_test_sink_bob;
select is(pg_temp.raised(format('select pgqueue.sink_commit(%L, array[%L]::uuid[], ''{1}'', ''bob'', 1)', pg_temp.run(20), :'alices')),
    format('PQ010 run %s staged 1 messages in partition unknown, and 0 are there', pg_temp.run(20)), 'nobody commits what another role has staged');
select is(pgqueue.sink_abort(pg_temp.run(20)), 0::bigint, 'nor discards it');
select is(pg_temp.raised(w.statement), '42501 permission denied for table ' || w.name, w.sentence)
from (values
    ('select from pgqueue.staged_messages', 'staged_messages', 'nobody reads it'),
    ('update pgqueue.staged_messages set payloads = null', 'staged_messages', 'nor changes it'),
    ('delete from pgqueue.staged_messages', 'staged_messages', 'nor deletes it'),
    ('insert into pgqueue.staged_messages (token, row_number) values (gen_random_uuid(), 1) returning token', 'staged_messages', 'nor reads what he adds'),
    ('select from pgqueue.staged_attempts', 'staged_attempts', 'nobody sees who stages'),
    ('insert into pgqueue.staged_attempts (token, run, partition, attempt, queue_name, staged_by, staged_at) values (gen_random_uuid(), gen_random_uuid(), 0, 0, ''sink'', ''postgres'', now())', 'staged_attempts', 'nor stages in another''s name'),
    ('select from pgqueue.sink_commits', 'sink_commits', 'nobody reads the ledger'),
    ('delete from pgqueue.sink_commits', 'sink_commits', 'nor lets it forget')
) w (statement, name, sentence);
set local session authorization pgqueue_test_sink_alice;
select is(pgqueue.sink_commit(pg_temp.run(20), array[:'alices']::uuid[], '{1}', 'alice', 1), true, 'who staged it commits it, with no more than a producer''s access');
set local session authorization pgqueue_test_sink_bob;
select pgqueue.sink_stage('sink', pg_temp.run(21), 0, 1) as bobs \gset
insert into pgqueue.staged_messages (token, row_number, payloads) values (:'bobs', 1, '{"\"bob\""}');
select is(pg_temp.raised(format('select pgqueue.sink_commit(%L, array[%L]::uuid[], ''{1}'', ''alice'', 1)', pg_temp.run(21), :'bobs')), '22023 invalid app_id: ''alice''', 'another role''s entry in the ledger discards nothing of ours');
reset session authorization;
select is(pg_temp.sent('sink'), array['1', '2', '3', '"alice"']::jsonb[], 'alice''s message was sent, and bob''s was not');
select is(pg_temp.left_over(pg_temp.run(21)), '{1,1}', 'which is still staged');

-- Sweeping.
delete from pgqueue.staged_attempts;
delete from pgqueue.staged_messages;
delete from pgqueue.sink_commits;
select pg_temp.staged('sink', pg_temp.run(30), 0, 1, '{1,2}') as old \gset
insert into pgqueue.staged_messages (token, row_number, payloads) values (pg_temp.run(98), 1, '{1}');
select is((select count(*) from pgqueue.doctor() d where d.finding = 'stale_staging'), 0::bigint, 'doctor finds nothing stale in a run that began just now');
set local test.now = '2030-01-02 12:00:00+00';
select pg_temp.staged('sink', pg_temp.run(31), 0, 1, '{3}') as young \gset
select is((select row(d.severity, d.detail, d.repair)::text from pgqueue.doctor() d where d.finding = 'stale_staging'),
    row('warning', format('1 attempts of 1 runs, staged by %s, wait for a sink_commit, the first for 1 day: their drivers died', session_user), 'select pgqueue.sweep_staged();')::text, 'but in one that began a day ago');
select is(pgqueue.sweep_staged('25 h'), 1::bigint, 'a sweep removes what nobody was given a token for');
select is(pgqueue.sweep_staged(), 2::bigint, 'and what was staged a day ago');
select is(pg_temp.left_over(pg_temp.run(30)) || pg_temp.left_over(pg_temp.run(31)), '{0,0,1,1}', 'and nothing else');
select is(pg_temp.raised(format('select pgqueue.sink_commit(%L, array[%L]::uuid[], ''{2}'')', pg_temp.run(30), :'old')), format('PQ010 run %s staged 2 messages in partition unknown, and 0 are there', pg_temp.run(30)), 'who was swept away is told so');
select is(pg_temp.raised(format('insert into pgqueue.staged_messages (token, row_number, payloads) values (%L, 1, array[null]::jsonb[])', pg_temp.run(30))), '22023 row 1 of partition unknown: invalid payload: null', 'who stages under a token that is gone is told what is wrong all the same');

-- Forgetting.
select pgqueue.sink_commit(pg_temp.run(40 + v), '{}', '{}', 'app', v) from unnest(array[1, 2, 4, 5]) v;
select pgqueue.sink_commit(pg_temp.run(50), '{}', '{}');
set local test.now = '2030-04-02 12:00:00+00';
select pgqueue.sink_commit(pg_temp.run(47), '{}', '{}', 'app', 3), pgqueue.sink_commit(pg_temp.run(48), '{}', '{}', 'app', 7);
select pgqueue.sweep_staged('10 years') as swept \gset
select is((select array_agg(row(c.app_id, c.version, c.forgotten_version)::text order by c.app_id, c.version) from pgqueue.sink_commits c), array['(app,3,)', '(app,7,5)'], 'after 90 days the ledger forgets versions and runs');
select is(pgqueue.sink_commit(pg_temp.run(60), '{}', '{}', 'app', 7), false, 'but not what is younger');
select is(pg_temp.raised(format('select pgqueue.sink_commit(%L, ''{}'', ''{}'', ''app'', 5)', pg_temp.run(60))), '22023 invalid version: ''5''', 'a version that it forgot is refused');
select is(pgqueue.sink_commit(pg_temp.run(60), '{}', '{}', 'app', 6), true, 'one that it never knew is not');
delete from pgqueue.sink_commits c where c.version = 6;
select pgqueue.sweep_staged(forget_after => '0') as swept \gset
select is((select array_agg(row(c.app_id, c.version, c.forgotten_version)::text) from pgqueue.sink_commits c), array['(app,7,5)'], 'the highest version of an app_id is never forgotten, nor how far it forgot');
select pgqueue.sink_commit(pg_temp.run(61), '{}', '{}', 'app', 8), pgqueue.sweep_staged(forget_after => '0') \gset
select is((select array_agg(row(c.app_id, c.version, c.forgotten_version)::text) from pgqueue.sink_commits c), array['(app,8,7)'], 'how far goes on to the next version');

select * from finish();
rollback;
