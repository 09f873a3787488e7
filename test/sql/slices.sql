begin;
-- The locks make test files wait for each other: this file attaches tables and stops the clock.
lock table pgqueue.messages in access exclusive mode;
lock table pgqueue.archived_messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(83);

-- 60 kB that cannot be compressed. Slices have at most 128 kB and one message, and a claim moves eight of them.
select string_agg(sha256(n::text::bytea), '') as large from generate_series(1, 1920) as n \gset
select set_config('test.large', :'large', true) \g /dev/null

create function pg_temp.left_in(queue text) returns bigint language plpgsql
as $$ begin return (select count(*) from pgqueue.messages m where m.queue_name = queue); end $$;
-- A queue with 60 messages that no claim returns any more, and a healthy one behind them.
create function pg_temp.spend(queue text, kind jsonb, expires boolean default false) returns bigint language plpgsql as $$
declare
    healthy bigint;
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', max_attempts => 1, dead_letter_expired => true,
        dedicated => kind ? 'dedicated', group_limit => (kind ->> 'group_limit')::int, priorities => kind ? 'priorities');
    perform pgqueue.enqueue_batch(queue, bodies => array_fill(current_setting('test.large')::bytea, array[60]),
        expires_in => case when expires then interval '40 s' end,
        group_keys => case when kind ? 'group_limit' then (select array_agg('group ' || n) from generate_series(1, 60) n) end);
    healthy := pgqueue.enqueue(queue, '"healthy"', group_key => case when kind ? 'group_limit' then 'healthy' end);
    update pgqueue.messages set max_attempts = case when expires then 5 else max_attempts end + (id = healthy)::int where queue_name = queue;
    perform pgqueue.claim(queue, 100);
    perform pg_temp.pass('41 s');
    return healthy;
end;
$$;
create function pg_temp.claims(queue text, verb text, kind jsonb, expires boolean default false) returns setof text language plpgsql as $$
declare
    healthy constant bigint := pg_temp.spend(queue, kind, expires);
    found_ids bigint[] := '{}';
    n int := 0;
begin
    execute format('select array_agg(m.id) from pgqueue.%I(%L) m', verb, queue) into found_ids;
    return next cmp_ok(pg_temp.left_in(queue), '>=', 60::bigint - 24, format('%s: one %s removes spent messages of about 1 MB', queue, verb));
    while pg_temp.left_in(queue) > 1 and n < 60 loop
        n := n + 1;
        execute format('select %L::bigint[] || array_agg(m.id) from pgqueue.%I(%L) m', found_ids, verb, queue) into found_ids;
    end loop;
    return next is(array_remove(found_ids, null), array[healthy], format('%s: the healthy message is returned', queue));
    return next is((select count(*) from pgqueue.dead_messages d where d.queue_name = queue), 60::bigint, format('%s: later calls remove the rest', queue));
    return next is((select count(distinct d.body) from pgqueue.dead_messages d where d.queue_name = queue and d.body = current_setting('test.large')::bytea), 1::bigint,
        format('%s: dead letters have the body of their messages', queue));
    return next is((select s.dead_total from pgqueue.stats(queue) s), 60::bigint, format('%s: each dead letter is counted once', queue));
end;
$$;
select pg_temp.claims('slices-claim', 'claim', '{}');
select pg_temp.claims('slices-receive', 'receive', '{"dedicated": true}');
select pg_temp.claims('slices-expired', 'claim', '{}', true);
select pg_temp.claims('slices-groups', 'claim', '{"group_limit": 1}');
select pg_temp.claims('slices-wide-groups', 'claim', '{"group_limit": 2}');
select pg_temp.claims('slices-priorities', 'claim', '{"priorities": true}');

-- A ready message is found in the call that leaves spent ones before it.
select pg_temp.spend('slices-ready', '{}') as healthy \gset
select is((select array_agg(m.id) from pgqueue.claim('slices-ready') m), array[:healthy]::bigint[], 'a claim returns a ready message although it leaves spent messages before it');
select cmp_ok(pg_temp.left_in('slices-ready'), '>', 1::bigint, 'that claim has left spent messages');

-- Without time, as after half of statement_timeout: the clock of this file is years ahead of the statement.
create function pg_temp.repeats(queue text, verb text, n bigint, of bigint) returns setof text language plpgsql as $$
declare
    counts bigint[] := '{}';
    done bigint;
begin
    loop
        execute format('select pgqueue.%I(%L)', verb, queue) into done;
        exit when done = 0;
        counts := counts || done;
    end loop;
    return next cmp_ok(counts[1], '<=', n, verb || ' ends when half of statement_timeout has passed');
    return next is((select sum(c) from unnest(counts) as c)::bigint, of, verb || ' does the rest when it is repeated until it returns 0');
end;
$$;
select pg_temp.spend('slices-verbs', '{}') as healthy \gset
set local statement_timeout = '1 d';
select is((select array_agg(m.id) from pgqueue.claim('slices-verbs') m), array[:healthy]::bigint[], 'a claim without time returns ready messages');
select is(pg_temp.left_in('slices-verbs'), 61::bigint, 'a claim without time removes no spent message');
select pg_temp.repeats('slices-verbs', 'sweep_queue', 3, 60);
select pg_temp.repeats('slices-verbs', 'redrive', 3, 60);
select pg_temp.repeats('slices-verbs', 'purge_queue', 3, 61);
select pg_temp.spend('slices-verbs-2', '{}') as healthy \gset
select pg_temp.repeats('slices-verbs-2', 'redrive', 3, 60);
select pg_temp.spend('slices-verbs-3', '{}') as healthy \gset
select pg_temp.repeats('slices-verbs-3', 'purge_dead_messages', 3, 60);
select pg_temp.repeats('slices-verbs-3', 'purge_queue', 3, 1);
select pgqueue.create_queue('slices-verbs-4', dead_letter_expired => true) \g /dev/null
select pgqueue.enqueue_batch('slices-verbs-4', bodies => array_fill(current_setting('test.large')::bytea, array[80]), expires_in => '10 s',
    delays => (select array_agg(case when n % 2 = 0 then interval '1 h' else '0 s' end) from generate_series(1, 80) n)), pg_temp.pass('11 s') \g /dev/null
select pg_temp.repeats('slices-verbs-4', 'purge_expired', 3, 80);
select is((select count(*) from pgqueue.dead_messages d where d.queue_name = 'slices-verbs-4' and d.body = current_setting('test.large')::bytea), 80::bigint, 'dead letters of purge_expired have the body of their messages');
-- The next slice is read when the last one is done.
create function pg_temp.rows_read(call text, relation regclass) returns bigint language plpgsql as $$
declare
    before bigint;
    after bigint;
begin
    select t.idx_tup_fetch + t.seq_tup_read into before from pg_stat_xact_all_tables t where t.relid = relation;
    execute 'select ' || call;
    select t.idx_tup_fetch + t.seq_tup_read into after from pg_stat_xact_all_tables t where t.relid = relation;
    return after - before;
end;
$$;
create function pg_temp.reads(verb text, relation regclass) returns text language sql as $$
    select cmp_ok(pg_temp.rows_read(format('pgqueue.%I(%L)', verb, 'slices-reads'), relation), '<', 1000::bigint,
        verb || ' without time reads one slice of a large queue')
$$;
select pgqueue.create_queue('slices-reads') \g /dev/null
select count(*) from pgqueue.enqueue_batch('slices-reads', array_fill('1'::jsonb, array[4000]), delays => array_fill('1 h'::interval, array[2000]) || array_fill('0 s'::interval, array[2000])) \g /dev/null
insert into pgqueue.dead_messages (id, queue_name, enqueued_at, attempt_count, max_attempts, payload, reason)
select nextval('pgqueue.message_id'), 'slices-reads', now(), 5, 5, '1', 'rejected' from generate_series(1, 2000);
select pg_temp.reads('purge_queue', 'pgqueue.scheduled_messages');
delete from pgqueue.scheduled_messages where queue_name = 'slices-reads';
select pg_temp.reads('purge_queue', 'pgqueue.messages_shared');
select pg_temp.reads('purge_dead_messages', 'pgqueue.dead_messages');

-- Many messages that have expired at ids that claims have passed.
create function pg_temp.expire(queue text, group_limit int default null, priorities boolean default false, group_key text default null)
returns bigint language plpgsql as $$
begin
    perform pgqueue.create_queue(queue, group_limit => group_limit, priorities => priorities);
    perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[6000]), expires_in => '10 s', group_keys => array_fill(group_key, array[6000]));
    perform setval(q.fresh_from_id, pg_sequence_last_value('pgqueue.message_id') + 1) from pgqueue.queues q where q.name = queue;
    perform setval(format('pgqueue.queue_%s_level_0', q.queue_id), (9::bigint << 59) + pg_sequence_last_value('pgqueue.message_id') + 1)
    from pgqueue.queues q where q.name = queue and q.priorities;
    perform pg_temp.pass('11 s');
    return pgqueue.enqueue(queue, '"healthy"', group_key => group_key);
end;
$$;
select pg_temp.expire('slices-found') \g /dev/null
select cmp_ok(pg_temp.rows_read($$ pgqueue.sweep_queue('slices-found') $$, 'pgqueue.messages_shared'), '<', 3000::bigint,
    'sweep_queue without time looks for as many spent messages as it can remove soon');
select pgqueue.purge_expired('slices-found') \g /dev/null
select cmp_ok((select count(*) from pgqueue.messages m where m.queue_name = 'slices-found' and m.xmax <> '0'), '<', 1000::bigint,
    'purge_expired without time locks no more messages than it removes');
set local statement_timeout = 0;
select pg_temp.expire('slices-found-priorities', priorities => true) \g /dev/null
select pgqueue.claim('slices-found'), pgqueue.claim('slices-found-priorities') \g /dev/null
-- As in a claim.
set local enable_seqscan = off; set local enable_bitmapscan = off; set local enable_sort = off;
select cmp_ok(pg_temp.rows_read($$ (pgqueue._remove_spent_messages(q, array(select m.id from pgqueue.messages m where m.queue_name = q.name), pgqueue._now(), 8)).has_more
    from pgqueue.queues q where q.name = 'slices-found-priorities' $$, 'pgqueue.messages_prioritized'), '<', 9000::bigint,
    'a claim measures as many spent messages as it can remove');
reset enable_seqscan; reset enable_bitmapscan; reset enable_sort;
select is(pgqueue.redrive('slices-verbs-4'), 80, 'without statement_timeout redrive returns all dead letters in one call');

-- Messages that come due.
select cmp_ok((select count(*) from pgqueue.claim('slices-verbs-4', 100)), '<', 80::bigint, 'a claim does not move 5 MB of due messages at once');
create function pg_temp.claim_all(queue text) returns bigint language plpgsql as $$
declare
    found bigint;
    all_found bigint := 0;
begin
    loop
        select count(*) into found from pgqueue.claim(queue, 100);
        exit when found = 0;
        all_found := all_found + found;
    end loop;
    return all_found;
end;
$$;
select cmp_ok(pg_temp.claim_all('slices-verbs-4'), '>', 0::bigint, 'later claims return the other messages that are due');
select is(pg_temp.left_in('slices-verbs-4'), 80::bigint, 'every message that was due has been moved once');
-- Cancelled after its moves, it would undo them, and each later claim would begin anew.
do $$ begin
    perform pgqueue.create_queue('slices-due'), pgqueue.create_queue('slices-due-groups', group_limit => 1),
        pgqueue.create_queue('slices-due-priorities', priorities => true);
    perform pgqueue.enqueue_batch(q.name, array_fill('1'::jsonb, array[200]), '10 s') from pgqueue.queues q where q.name ~ '^slices-due';
    perform pg_temp.pass('11 s');
end $$;
set local statement_timeout = '1 d';
select is((select count(*) > 0 from pgqueue.claim(q.name, case when q.priorities then 100 else 200 end)), true, q.name || ': a claim without time returns due messages')
from pgqueue.queues q where q.name ~ '^slices-due';
select is(s.recorded_at, '1970-01-01 00:00+00', s.queue_name || ': after it has moved due messages, a claim without time makes no sweep')
from pgqueue.sweep_state s where s.queue_name ~ '^slices-due';
set local statement_timeout = 0;

-- Acknowledged messages whose day has no partition.
select pgqueue.create_queue('slices-archive', archive_for => '1 day') \g /dev/null
insert into pgqueue.unfiled_messages (id, queue_name, enqueued_at, finished_at, attempt_count, max_attempts, body)
select n, 'slices-archive', now(), pgqueue._now(), 1, 5, current_setting('test.large')::bytea from generate_series(1, 20) n;
select pgqueue._at_housekeeping_archive(pgqueue._now()) \g /dev/null
select cmp_ok((select count(*) from pgqueue.unfiled_messages u where u.queue_name = 'slices-archive'), '>=', 14::bigint, 'the housekeeping of a claim files unfiled messages of about 256 kB');
select cmp_ok((select count(*) from pgqueue.unfiled_messages u where u.queue_name = 'slices-archive'), '<', 20::bigint, 'the housekeeping of a claim files some unfiled messages');
select count(*) from pgqueue.maintain_archive() \g /dev/null
select is((select count(*) from pgqueue.unfiled_messages u where u.queue_name = 'slices-archive'), 0::bigint, 'maintain_archive files the other unfiled messages');

-- A claim passes expired messages that no claim has reached. Here each reading of the clock takes 0.1 ms.
create sequence pg_temp.readings;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz + nextval('pg_temp.readings') * interval '100 us' $$;
create function pg_temp.walks(queue text, dedicated boolean, group_limit int default null, priorities boolean default false)
returns setof text language plpgsql as $$
declare
    healthy bigint;
    found_ids bigint[];
begin
    perform pgqueue.create_queue(queue, dedicated => dedicated, group_limit => group_limit, priorities => priorities);
    perform pgqueue.claim(queue);
    perform pgqueue.enqueue_batch(queue, payloads => array_fill('1'::jsonb, array[1200]), expires_in => '1 s');
    healthy := pgqueue.enqueue(queue, '"healthy"');
    perform pg_temp.pass('2 s');
    if priorities then
        -- A sweep, with which a claim continues, finds the message.
        select pgqueue._walk_levels(q, pgqueue._now(), '{}', 1, false) into found_ids from pgqueue.queues q where q.name = queue;
    else
        found_ids := array(select c.id from pgqueue.claim(queue) c);
    end if;
    return next is(found_ids, '{}', queue || ': a claim without time ends on its way past expired messages');
    for n in 1..100 loop
        exit when found_ids <> '{}';
        found_ids := array(select c.id from pgqueue.claim(queue) c);
    end loop;
    return next is(found_ids, array[healthy], queue || ': later claims go on and return the message behind them');
end;
$$;
set local statement_timeout = '1 d';
create function pg_temp.finds_few(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    healthy bigint;
begin
    perform pgqueue.create_queue(queue, dedicated => has_table);
    perform pgqueue.claim(queue);
    perform pgqueue.enqueue_batch(queue, payloads => array_fill('1'::jsonb, array[1200]), expires_in => '1 s');
    healthy := pgqueue.enqueue(queue, '"healthy"');
    perform pg_temp.pass('2 s');
    return next is(array(select c.id from pgqueue.claim(queue, 10000) c), array[healthy], queue || ': a claim without time that finds too few messages returns no expired one');
end;
$$;
select pg_temp.finds_few('slices-few', false);
select pg_temp.finds_few('slices-few-dedicated', true);
select pg_temp.walks('slices-walk', false);
select pg_temp.walks('slices-walk-dedicated', true);
select pg_temp.walks('slices-walk-ungrouped', true, group_limit => 1);
select pg_temp.walks('slices-walk-priorities', true, priorities => true);

-- The messages of one group.
create function pg_temp.passes(queue text, most_rows bigint, relation regclass) returns setof text language plpgsql as $$
declare
    rows_read bigint;
    found_ids bigint[];
    n int := 0;
begin
    rows_read := pg_temp.rows_read(format('(select count(*) from pgqueue.claim(%L))', queue), relation);
    return next cmp_ok(rows_read, '<', most_rows, queue || ': a claim without time reads some of the expired messages of a group');
    set local statement_timeout = 0;
    while pg_temp.left_in(queue) > 1 and n < 60 loop
        n := n + 1;
        perform pgqueue.claim(queue);
    end loop;
    return next is(pg_temp.left_in(queue), 1::bigint, queue || ': few claims remove all messages of a group that have expired');
end;
$$;
select pg_temp.expire('slices-wide-group', 2, group_key => 'a') \g /dev/null
select pg_temp.passes('slices-wide-group', 3000, 'pgqueue.messages_grouped');
set local statement_timeout = '1 d';
select pg_temp.expire('slices-strict-group', 1, group_key => 'a') \g /dev/null
select pg_temp.passes('slices-strict-group', 3000, 'pgqueue.messages_grouped');

-- A claim that has read for long.
select pgqueue.create_queue('slices-late', max_attempts => 1) \g /dev/null
select pgqueue.enqueue('slices-late', '1') \g /dev/null
select pgqueue.claim('slices-late') \g /dev/null
select pg_temp.pass('2 min') \g /dev/null
select is((pgqueue._remove_spent_messages(q, array(select m.id from pgqueue.messages m where m.queue_name = q.name), pgqueue._now() - interval '1 min', 8)).removed, 1,
    'a claim whose time has passed removes a slice') from pgqueue.queues q where q.name = 'slices-late';

select * from finish();
rollback;
