begin;
-- The locks make test files wait for each other: this file attaches tables and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(84);

-- Upper bounds for the buffers of one call: about twice the highest figure measured, on PostgreSQL 15. A walk over
-- the whole queue takes 1,000 or more. Calls that run a sweep have higher bounds, because a sweep may also maintain
-- the archive.
create temporary table bounds (call text, most int) on commit drop;
insert into bounds values
    ('claim 10', 220), ('extend_batch of 10', 130), ('exchange 10 for 10', 340), ('ack_batch of 10', 160),
    ('claim', 40), ('extend', 20), ('exchange', 60), ('ack', 30), ('nack', 40), ('receive', 50), ('receive 10', 190),
    ('extend_claims of 10', 210), ('ack_claims of 5', 130), ('nack_claims of 5', 190), ('release_claims of 5', 160),
    ('record_failure', 60), ('record_failure of what is not due', 50), ('release of 5', 130), ('claim 10 where 5 came due', 500),
    ('ack_batch of 10 and the last', 180), ('claim 10 where 5 ran out', 3000), ('claim 10 where 5 are spent', 3000);

create function pg_temp.buffers(statement text, variadic arguments text[]) returns int language plpgsql as $$
declare
    plan json;
begin
    execute 'explain (analyze, buffers, timing off, format json) select ' || format(statement, variadic arguments) into plan;
    return (plan -> 0 -> 'Plan' ->> 'Shared Hit Blocks')::int + (plan -> 0 -> 'Plan' ->> 'Shared Read Blocks')::int;
end;
$$;

-- A session makes all calls while a queue is small, and therefore keeps plans for a small queue.
create function pg_temp.calls(queue text, out call text, out buffers int, out left_over int) returns setof record language plpgsql as $$
declare
    ids text;
    token text;
    tokens text;
    one_id bigint;
begin
    -- No sweep runs except in the calls that test one.
    perform setval(q.next_sweep_at, pgqueue._to_micros(pgqueue._now() + interval '14 s')) from pgqueue.queues q where q.name = queue;
    call := 'claim 10';
    buffers := pg_temp.buffers('pgqueue.claim(%L, 10, ''1 h'', %L)', queue, call);
    return next;
    select array_agg(m.id)::text, min(m.claim_token::text) into ids, token from pgqueue.messages m where m.queue_name = queue and m.claimed_by = call;
    call := 'extend_batch of 10';
    buffers := pg_temp.buffers('pgqueue.extend_batch(%L, %L, %L)', queue, ids, token);
    return next;
    call := 'exchange 10 for 10';
    buffers := pg_temp.buffers('pgqueue.exchange(%L, %L, %L, 10, ''1 h'', %L)', queue, ids, token, call);
    return next;
    select array_agg(m.id)::text, min(m.claim_token::text) into ids, token from pgqueue.messages m where m.queue_name = queue and m.claimed_by = call;
    call := 'ack_batch of 10';
    buffers := pg_temp.buffers('pgqueue.ack_batch(%L, %L, %L)', queue, ids, token);
    return next;

    call := 'claim';
    buffers := pg_temp.buffers('pgqueue.claim(%L, 1, ''1 h'', %L)', queue, call);
    return next;
    select m.id, m.claim_token into one_id, token from pgqueue.messages m where m.queue_name = queue and m.claimed_by = call;
    call := 'extend';
    buffers := pg_temp.buffers('pgqueue.extend(%L, %s, %L)', queue, one_id::text, token);
    return next;
    call := 'exchange';
    buffers := pg_temp.buffers('pgqueue.exchange(%L, %L, %L, 1, ''1 h'', %L)', queue, array[one_id]::text, token, call);
    return next;
    select m.id, m.claim_token into one_id, token from pgqueue.messages m where m.queue_name = queue and m.claimed_by = call;
    call := 'ack';
    buffers := pg_temp.buffers('pgqueue.ack(%L, %s, %L)', queue, one_id::text, token);
    return next;
    perform pgqueue.claim(queue, 1, '1 h', 'nack');
    select m.id, m.claim_token into one_id, token from pgqueue.messages m where m.queue_name = queue and m.claimed_by = 'nack';
    call := 'nack';
    buffers := pg_temp.buffers('pgqueue.nack(%L, %s, %L, ''1 h'')', queue, one_id::text, token);
    return next;
    call := 'receive';
    buffers := pg_temp.buffers('pgqueue.receive(%L)', queue);
    return next;
    call := 'receive 10';
    buffers := pg_temp.buffers('pgqueue.receive(%L, 10)', queue);
    return next;
    select m.id into one_id from pgqueue.messages m where m.queue_name = queue and m.attempt_count = 0 order by m.id limit 1;
    call := 'record_failure';
    buffers := pg_temp.buffers('pgqueue.record_failure(%L, %s, 1, ''1 h'')', queue, one_id::text);
    return next;
    call := 'record_failure of what is not due';
    buffers := pg_temp.buffers('pgqueue.record_failure(%L, %s, 1, ''1 h'')', queue, pgqueue.enqueue(queue, '1', delay => '1 h')::text);
    return next;

    perform pgqueue.claim(queue, n - n + 2, '1 h', 'many') from generate_series(1, 5) n;
    select array_agg(m.id)::text, array_agg(m.claim_token)::text into ids, tokens from pgqueue.messages m where m.queue_name = queue and m.claimed_by = 'many';
    call := 'extend_claims of 10';
    buffers := pg_temp.buffers('pgqueue.extend_claims(%L, %L, %L)', queue, ids, tokens);
    return next;
    call := 'ack_claims of 5';
    buffers := pg_temp.buffers('pgqueue.ack_claims(%L, %L, %L)', queue, ((ids::bigint[])[:5])::text, ((tokens::uuid[])[:5])::text);
    return next;
    call := 'nack_claims of 5';
    buffers := pg_temp.buffers('pgqueue.nack_claims(%L, %L, %L, ''1 h'')', queue, ((ids::bigint[])[6:])::text, ((tokens::uuid[])[6:])::text);
    return next;
    perform pgqueue.claim(queue, n - n + 1, '1 h', 'give back') from generate_series(1, 5) n;
    select array_agg(m.id)::text, array_agg(m.claim_token)::text into ids, tokens from pgqueue.messages m where m.queue_name = queue and m.claimed_by = 'give back';
    call := 'release_claims of 5';
    buffers := pg_temp.buffers('pgqueue.release_claims(%L, %L, %L)', queue, ids, tokens);
    return next;

    perform pgqueue.claim(queue, 5, '1 h', 'release');
    select array_agg(m.id)::text, min(m.claim_token::text) into ids, token from pgqueue.messages m where m.queue_name = queue and m.claimed_by = 'release';
    call := 'release of 5';
    buffers := pg_temp.buffers('pgqueue.release(%L, %L, %L)', queue, ids, token);
    return next;
    call := 'claim 10 where 5 came due';
    buffers := pg_temp.buffers('pgqueue.claim(%L, 10, ''1 h'', %L)', queue, call);
    return next;
    select array_agg(m.id)::text, min(m.claim_token::text) into ids, token from pgqueue.messages m where m.queue_name = queue and m.claimed_by = call;
    -- Another id from the far end of the queue, given first and last, and a null.
    select m.id into one_id from pgqueue.messages m where m.queue_name = queue order by m.id desc limit 1;
    update pgqueue.messages m
    set claim_token = token::uuid, attempt_count = 1, claimed_attempt = 1, claimed_at = pgqueue._now(), visible_at = pgqueue._now() + interval '1 h'
    where m.queue_name = queue and m.id = one_id;
    call := 'ack_batch of 10 and the last';
    buffers := pg_temp.buffers('pgqueue.ack_batch(%L, %L, %L)', queue, (array[one_id, null, one_id] || ids::bigint[])::text, token);
    return next;
    left_over := (select count(*) from pgqueue.messages m where m.queue_name = queue and m.claim_token = token::uuid);

    perform pgqueue.claim(queue, 5, '1 s', 'crash');
    perform pg_temp.pass('2 s');
    perform setval(q.next_sweep_at, 1), setval(q.sweep_resume_id, 1) from pgqueue.queues q where q.name = queue;
    call := 'claim 10 where 5 ran out';
    buffers := pg_temp.buffers('pgqueue.claim(%L, 10, ''1 s'', ''crash'')', queue);
    return next;
    perform pg_temp.pass('2 s');
    perform setval(q.next_sweep_at, 1), setval(q.sweep_resume_id, 1) from pgqueue.queues q where q.name = queue;
    call := 'claim 10 where 5 are spent';
    buffers := pg_temp.buffers('pgqueue.claim(%L, 10, ''1 s'', ''crash'')', queue);
    return next;
end;
$$;

create function pg_temp.keeps_short(queue text, has_table boolean, archives boolean) returns setof text language plpgsql as $$
declare
    c record;
    left_over int;
begin
    perform pgqueue.create_queue(queue, max_attempts => 2, dedicated => has_table, archive_for => case when archives then interval '1 day' end);
    perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[100]));
    perform pg_temp.calls(queue);
    perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[10000]), delay => '2 h');
    perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[30000]));
    -- The fewer buffers of two calls: a session that invalidates cached catalogs makes one call read them again.
    for c in
        select r.call, min(r.buffers) as buffers, max(r.left_over) as left_over, b.most
        from (select * from pg_temp.calls(queue) union all select * from pg_temp.calls(queue)) r
        left join bounds b using (call)
        group by r.call, b.most
        order by r.call
    loop
        return next cmp_ok(c.buffers, '<', c.most, queue || ': ' || c.call || ' stays within its buffers with plans from when the queue was small');
        left_over := coalesce(c.left_over, left_over);
    end loop;
    return next is(left_over, 0, queue || ': ack_batch finds every id, wherever the messages lie');
end;
$$;
select pg_temp.keeps_short('short_shared', false, false);
select pg_temp.keeps_short('short_dedicated', true, false);
select pg_temp.keeps_short('short_archived', true, true);

-- Functions used for each row are inlined into the query: a call for each row would cost more than the rest.
set local track_functions = 'all';
create function pg_temp.functions_called() returns table (name text, calls bigint) language sql
as $$ select funcname || '(' || pg_get_function_identity_arguments(funcid) || ')', calls from pg_stat_xact_user_functions where schemaname = 'pgqueue' $$;
create function pg_temp.called_by_verbs(queue text, number int) returns void language plpgsql as $$
declare
    ids bigint[];
    token uuid;
begin
    perform pgqueue.create_queue(queue);
    perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[3 * number]));
    perform pgqueue.peek(queue, 10000);
    perform pgqueue.browse(queue, max_messages => 10000);
    perform pgqueue.stats(queue);
    select array_agg(id), min(claim_token::text)::uuid into ids, token from pgqueue.claim(queue, number);
    perform pgqueue.extend_batch(queue, ids, token, '1 min');
    perform pgqueue.extend_claims(queue, ids, array_fill(token, array[number]), '1 min');
    perform pgqueue.sweep_queue(queue);
    select array_agg(id) filter (where not lost), min(claim_token::text)::uuid into ids, token from pgqueue.exchange(queue, ids, token, number);
    perform pgqueue.ack_claims(queue, ids, array_fill(token, array[number]));
    perform pgqueue.receive(queue, number);
end;
$$;
select pg_temp.called_by_verbs('called_one', 1);
create temporary table called_before on commit drop as select * from pg_temp.functions_called();
select pg_temp.called_by_verbs('called_many', 100);
select is_empty(
    'select a.name, a.calls from pg_temp.functions_called() a left join called_before b using (name) where a.calls > 2 * coalesce(b.calls, 0) + 10',
    'no function is called once for each message'
);

-- Rows of requeued_messages are removed without a walk over those that were removed before, also with the plan of a
-- small table.
select pgqueue.create_queue('pruned') is not null as made \gset
insert into pgqueue.requeued_messages (queue_name, check_at, id) values ('pruned', '2030-01-01', 1);
analyze pgqueue.requeued_messages;
select pgqueue._prune_requeued(q, array['(0,1)']::tid[], '2029-01-01')
from pgqueue.queues q, generate_series(1, 10) where q.name = 'pruned';
insert into pgqueue.requeued_messages (queue_name, check_at, id)
select 'pruned', '2030-01-01'::timestamptz + i * interval '1 us', i from generate_series(1, 20000) i;
delete from pgqueue.requeued_messages where queue_name = 'pruned';
insert into pgqueue.requeued_messages (queue_name, check_at, id) select 'pruned', '2030-01-02', i from generate_series(1, 10) i;
create temporary table gone on commit drop as
select array_agg(r.ctid) as places from pgqueue.requeued_messages r where r.queue_name = 'pruned';
select cmp_ok(
    pg_temp.buffers(
        'pgqueue._prune_requeued(q, %L, ''2030-01-03'') from pgqueue.queues q where q.name = ''pruned''', g.places::text),
    '<', 100, 'rows of requeued_messages are deleted by their place'
) from gone g;

-- A claim that counts the messages in flight does not read those that wait for their retry in a queue with groups.
select pgqueue.create_queue('waiting', group_limit => 1, max_in_flight => 100) is not null as made \gset
insert into pgqueue.messages (queue_name, payload, visible_at, attempt_count, claimed_attempt, headers)
select 'waiting', '1', '2030-02-01', 1, 1, '{"pgqueue.group": "retried"}' from generate_series(1, 10000);
select pgqueue.enqueue_batch('waiting', array_agg('1'::jsonb), group_keys => array_agg('g' || n)) from generate_series(1, 20) as n \g /dev/null
select cmp_ok(min(pg_temp.buffers('pgqueue.claim(%L)', 'waiting')), '<', 200, 'a claim with max_in_flight reads no messages that wait for their retry')
from generate_series(1, 5);

-- A claim looks once whether a group waits for its dead letters, however many it has.
select pgqueue.create_queue('holding', group_limit => 1, on_dead => 'hold') is not null as made \gset
insert into pgqueue.dead_messages (id, queue_name, enqueued_at, attempt_count, max_attempts, payload, headers, reason)
select nextval('pgqueue.message_id'), 'holding', '2030-01-01', 1, 1, '1', jsonb_build_object('pgqueue.group', 'g' || n % 200), 'rejected'
from generate_series(1, 20000) as n;
select pgqueue.enqueue_batch('holding', array_agg('1'::jsonb), group_keys => array_agg('g' || n)) from generate_series(0, 199) as n \g /dev/null
select cmp_ok(min(pg_temp.buffers('pgqueue.claim(%L)', 'holding')), '<', 4000, 'a claim that passes 200 groups with 100 dead letters each reads few buffers')
from generate_series(1, 3);

-- In a queue with groups, to look for messages without attempts reads those with an attempt, and not the backlog.
select pgqueue.create_queue('backlog', max_attempts => 1, group_limit => 1) is not null as made \gset
select pgqueue.redrive('backlog') from generate_series(1, 10) \g /dev/null
insert into pgqueue.messages (queue_name, payload, attempt_count, max_attempts, kind, headers)
select 'backlog', '1', (n = 20000)::int, 1, 1, '{"pgqueue.group": "one"}' from generate_series(1, 20001) as n;
select cmp_ok(pg_temp.buffers('pgqueue.redrive(%L)', 'backlog'), '<', 300, 'redrive in a queue with groups does not read the backlog');
select is((select count(*) from pgqueue.requeued_messages r where r.queue_name = 'backlog'), 1::bigint, 'redrive finds the message without attempts behind the backlog');

-- Verbs look for one scheduled message by its id, also with plans that were made while no message was scheduled.
select pgqueue.create_queue('delayed', dedup_window => '1 day') is not null as made \gset
truncate pgqueue.scheduled_messages;
select pgqueue.enqueue('delayed', '1', dedup_key => 'k') as number \gset
create temporary table by_id (verb text, arguments text) on commit drop;
insert into by_id values
    ('cancel', :number + 1), ('reschedule', :number || ', ''2030-01-20'''),
    ('enqueue', '''2'', dedup_key => ''k'', on_duplicate => ''replace''');
select pg_temp.buffers('pgqueue.%s(''delayed'', %s)', b.verb, b.arguments) from by_id b, generate_series(1, 2) \g /dev/null
insert into pgqueue.scheduled_messages (queue_name, payload, due_at) select 'delayed', '1', '2030-02-01'::timestamptz + n * interval '1 s' from generate_series(1, 20000) n;
select cmp_ok(min(pg_temp.buffers('pgqueue.%s(''delayed'', %s)', b.verb, b.arguments)), '<', 70, b.verb || ' reads no other scheduled messages')
from by_id b, generate_series(1, 3) group by b.verb;

-- Doctor looks for a scheduled message in the tables in which its queue can have messages.
select pgqueue.create_queue('table_' || n, dedicated => true) from generate_series(1, 20) as n \g /dev/null
select cmp_ok(min(pg_temp.buffers('pgqueue.browse(%L)', 'delayed')), '<', 350, 'browse of ready messages reads no messages that are not due')
from generate_series(1, 3);
select cmp_ok(pg_temp.buffers('pgqueue._id_findings(q, pgqueue._now()) from pgqueue.queues q where q.name = %L', 'delayed'), '<', 10000, 'doctor looks for messages with the same id in the tables of the queue');

-- Functions that remove many messages look up each message once. Comparing all pairs would take minutes.
set local work_mem = '64kB';
set local statement_timeout = '120 s';
-- With a clock that is behind, they do not end after half of it.
set local test.now = '2020-01-01 12:00:00+00';
select pgqueue.create_queue('many') is not null as made \gset
insert into pgqueue.messages (queue_name, payload) select 'many', to_jsonb(repeat('x', 300)) from generate_series(1, 80000);
insert into pgqueue.scheduled_messages (queue_name, payload, due_at) select 'many', to_jsonb(repeat('x', 300)), '2030-02-01' from generate_series(1, 80000);
insert into pgqueue.dead_messages (queue_name, id, payload, attempt_count, max_attempts, enqueued_at, reason)
select 'many', nextval('pgqueue.message_id'), to_jsonb(repeat('x', 300)), 1, 1, '2029-01-01', 'rejected' from generate_series(1, 80000);
select is(pgqueue.purge_queue('many'), 160000::bigint, 'purge_queue deletes 160,000 messages within the statement timeout');
select is(pgqueue.redrive('many', 70000), 70000, 'redrive sends back 70,000 dead letters within the statement timeout');
select is(pgqueue.purge_dead_messages('many'), 10000::bigint, 'purge_dead_messages deletes 10,000 dead letters within the statement timeout');
update pgqueue.scheduled_messages set expires_at = '2019-01-01' where queue_name = 'many';
select is(pgqueue.purge_expired('many', 1000000), 70000, 'purge_expired deletes 70,000 messages within the statement timeout');

select * from finish();
rollback;
