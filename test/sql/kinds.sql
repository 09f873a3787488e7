begin;
-- The lock makes test files wait for each other: this file attaches tables.
lock table only pgqueue.messages in exclusive mode;
select plan(195);

-- A queue costs the others nothing.
select pgqueue.create_queue('many-' || n, group_limit => case n % 2 when 0 then 1 end, priorities => n % 2 = 1, max_in_flight => case n % 3 when 0 then 5 end) from generate_series(1, 30) n \g /dev/null
select is((select count(*) from pg_inherits i where i.inhparent = 'pgqueue.messages'::regclass and i.inhrelid::regclass::text ~ '_[0-9]+$'), 0::bigint, 'queues with groups, priorities and limits have no table of their own');
select is((select count(*) from pg_locks l where l.pid = pg_backend_pid() and l.relation in ('pgqueue.messages'::regclass, 'pgqueue.messages_shared'::regclass) and l.mode not in ('AccessShareLock', 'RowShareLock', 'RowExclusiveLock', 'ExclusiveLock')), 0::bigint, 'they are created and altered without a lock that stops other queues');

create temp table kinds (kind text, args text, number bigint);
insert into kinds values
('plain', 'group_limit => 0, priorities => false, max_in_flight => 0', null),
('grouped', 'group_limit => 1, priorities => false, max_in_flight => 0', 1),
('prioritized', 'group_limit => 0, priorities => true, max_in_flight => 0', 2),
('prioritized_limited', 'group_limit => 0, priorities => true, max_in_flight => 100', 3),
('limited', 'group_limit => 0, priorities => false, max_in_flight => 100', 4),
('grouped_limited', 'group_limit => 2, priorities => false, max_in_flight => 100', 1);
create function pg_temp.places(queue text) returns text language sql as $$
    select string_agg(distinct m.tableoid::regclass::text || ' ' || coalesce(m.kind::text, 'null'), ', ') from pgqueue.messages m where m.queue_name = queue
$$;
create function pg_temp.alter_to(queue text, to_kind text) returns pgqueue.queue language plpgsql as $$
declare
    q pgqueue.queue;
begin
    execute format('select (pgqueue.alter_queue(%L, %s)).*', queue, (select k.args from kinds k where k.kind = to_kind)) into q;
    return q;
end;
$$;
create function pg_temp.drain(queue text) returns text language plpgsql as $$
declare
    payloads text[] := '{}';
    m record;
    empty int := 0;
begin
    while empty < 3 loop
        empty := empty + 1;
        for m in select c.* from pgqueue.claim(queue, 10) c loop
            payloads := payloads || (m.payload #>> '{}');
            perform pgqueue.ack(queue, m.id, m.claim_token);
            empty := 0;
        end loop;
    end loop;
    return array_to_string(array(select p from unnest(payloads) p order by 1), ' ');
end;
$$;

-- A queue changes its kind while it has messages in every state.
create function pg_temp.changes(from_kind text, to_kind text) returns setof text language plpgsql as $$
declare
    queue constant text := format('%s-to-%s', from_kind, to_kind);
    held pgqueue.message;
    table_name constant text := (
        select format('pgqueue.messages_%s %s', case k.number when 1 then 'grouped' else coalesce(nullif(k.kind, 'plain'), 'shared') end, coalesce(k.number::text, 'null'))
        from kinds k where k.kind = to_kind);
begin
    perform pgqueue.create_queue(queue), pg_temp.alter_to(queue, from_kind);
    perform pgqueue.enqueue(queue, '"dead"');
    perform pgqueue.reject(queue, c.id, c.claim_token) from pgqueue.claim(queue) c;
    perform pgqueue.enqueue(queue, '"held"', group_key => 'a');
    select c.* into held from pgqueue.claim(queue) c;
    perform pgqueue.enqueue_batch(queue, '{"\"a1\"","\"a2\"","\"b1\""}'::jsonb[], group_keys => '{a,a,b}', priorities => '{1,9,null}');
    perform pgqueue.enqueue(queue, '"due"', delay => '1 us');
    perform pgqueue.enqueue(queue, '"later"', delay => '1 h');
    perform pg_temp.alter_to(queue, to_kind);
    return next is(pg_temp.places(queue), table_name, format('%s: all messages are in the table of the new kind', queue));
    return next is((select s.inflight_messages + s.scheduled_messages + s.dead_messages from pgqueue.stats(queue) s), 3::bigint, format('%s: the messages in flight, scheduled and dead are there', queue));
    return next is(pgqueue.extend(queue, held.id, held.claim_token), true, format('%s: a claim from before stays valid', queue));
    return next is(pgqueue.ack(queue, held.id, held.claim_token), true, format('%s: a message that was claimed before is acknowledged', queue));
    return next is(pg_temp.drain(queue), 'a1 a2 b1 due', format('%s: all other messages are delivered once', queue));
    perform pgqueue.enqueue(queue, '"new"');
    return next is(pg_temp.places(queue), table_name, format('%s: a new message goes to the table of the new kind', queue));
    return next is(pgqueue.redrive(queue), 1, format('%s: the dead letter is redriven', queue));
    return next is(pg_temp.drain(queue), 'dead new', format('%s: the dead letter and the new message are delivered', queue));
end;
$$;
select pg_temp.changes(f.kind, t.kind) from kinds f, kinds t
where f.kind <> t.kind and ('plain' in (f.kind, t.kind) or (f.kind, t.kind) in
    (('grouped', 'prioritized'), ('prioritized_limited', 'grouped_limited'), ('limited', 'prioritized'), ('prioritized', 'prioritized_limited')))
order by f.kind, t.kind;

-- The rules of the new kind apply to the messages from before.
select pgqueue.create_queue('rules'), pgqueue.enqueue('rules', '"a1"', group_key => 'a'), pgqueue.enqueue('rules', '"a2"', group_key => 'a'), pgqueue.enqueue('rules', '"b1"', group_key => 'b', priority => 9) \g /dev/null
select is((select c.payload from pgqueue.claim('rules') c), '"a1"', 'a queue without groups returns the first message');
select pg_temp.alter_to('rules', 'grouped') \g /dev/null
select is(array(select c.payload from pgqueue.claim('rules', 10) c), array['"b1"'::jsonb], 'after alter_queue a group waits for its message that was claimed before');
select is((pg_temp.alter_to('rules', 'plain')).group_limit, null, 'group_limit 0 ends the groups');
select is(array(select c.payload from pgqueue.claim('rules', 10) c), array['"a2"'::jsonb], 'without groups no message waits for another');
select is((pgqueue.alter_queue('rules', max_in_flight => 3)).max_in_flight, 3, 'alter_queue limits the messages in flight');
select pgqueue.enqueue('rules', '"c1"') \g /dev/null
select is_empty($$ select pgqueue.claim('rules', 10) $$, 'messages that were claimed before count as in flight');
select is((pgqueue.alter_queue('rules', max_in_flight => 0, priorities => true)).priorities, true, 'alter_queue gives priorities');
-- With this seed a claim begins with the highest priority.
select pgqueue.enqueue('rules', '"c2"', priority => 5), setseed(0.5) \g /dev/null
select is((select c.payload from pgqueue.claim('rules') c), '"c2"', 'a message with a higher priority is claimed before one that was sent before the change');
select throws_ok($$ select pgqueue.alter_queue('rules', group_limit => 1) $$, '22023', 'invalid priorities: ''true''', 'a queue with priorities gets no group_limit');
select pgqueue.create_queue('own', dedicated => true) \g /dev/null
select throws_ok(format('select pgqueue.alter_queue(''own'', %s)', a), '22023', null, format('a dedicated queue does not get %s', a)) from unnest('{group_limit => 1,priorities => true,max_in_flight => 1}'::text[]) a;
select pgqueue.create_queue('own-grouped', dedicated => true, group_limit => 1), pgqueue.create_queue('own-ranked', dedicated => true, priorities => true, max_in_flight => 2) \g /dev/null
select throws_ok($$ select pgqueue.alter_queue('own-grouped', group_limit => 0) $$, '22023', 'invalid group_limit: ''0''', 'a dedicated queue with groups keeps them');
select throws_ok($$ select pgqueue.alter_queue('own-ranked', priorities => false) $$, '22023', 'invalid priorities: ''false''', 'a dedicated queue with priorities keeps them');
select is((pgqueue.alter_queue('own-grouped', group_limit => 2)).group_limit, 2, 'a dedicated queue with groups gets another group_limit');
select is((pgqueue.alter_queue('own-ranked', max_in_flight => 0)).max_in_flight, null, 'max_in_flight of a dedicated queue ends');
select throws_ok($$ select pgqueue.alter_queue('own-ranked', max_in_flight => 2) $$, '22023', null, 'it cannot be given again');
select pgqueue.enqueue('own-grouped', '"a1"', group_key => 'a'), pgqueue.enqueue('own-ranked', '"low"'), pgqueue.enqueue('own-ranked', '"high"', priority => 9) \g /dev/null
select is((select c.payload from pgqueue.claim('own-grouped') c), '"a1"', 'a dedicated queue can have groups');
select setseed(0.5) \g /dev/null
select is((select c.payload from pgqueue.claim('own-ranked') c), '"high"', 'a dedicated queue can have priorities');
select lives_ok($$ select pgqueue.alter_queue('own', group_limit => 0, priorities => false, max_in_flight => 0) $$, 'a dedicated queue accepts values that change nothing');
select is((select k.kind > 1000 from pgqueue.queues k where k.name = 'own'), true, 'a dedicated queue keeps its kind');
-- Its table has the storage settings of messages_shared.
create function pg_temp.settings_of(queue text) returns text[] language sql
as $$ select c.reloptions from pg_class c join pgqueue.queues q on c.oid = pgqueue._partition_of(q) where q.name = queue $$;
alter table pgqueue.messages_shared set (parallel_workers = 0, autovacuum_vacuum_cost_delay = 0.5, log_autovacuum_min_duration = -1, vacuum_index_cleanup = on);
select pgqueue.create_queue('own-set', dedicated => true) \g /dev/null
select is(pg_temp.settings_of('own-set'), (select c.reloptions from pg_class c where c.oid = 'pgqueue.messages_shared'::regclass), 'a new dedicated table has the storage settings of messages_shared');
select format('alter table pgqueue.messages_shared reset (%s)', string_agg(o.option_name, ', ')) from pg_class c, pg_options_to_table(c.reloptions) o where c.oid = 'pgqueue.messages_shared'::regclass \gexec
select pgqueue.create_queue('own-unset', dedicated => true) \g /dev/null
select is(pg_temp.settings_of('own-unset'), null, 'it has none if that has none');

-- What plain SQL sends to such a queue.
create function pg_temp.adopts(k text) returns setof text language plpgsql as $$
declare
    queue constant text := 'plain-sql-' || k;
    found jsonb[];
begin
    perform pgqueue.create_queue(queue, dedicated => k = 'dedicated');
    if k <> 'dedicated' then
        perform pg_temp.alter_to(queue, k);
    end if;
    perform pgqueue.enqueue(queue, '"first"');
    perform pgqueue.claim(queue);
    insert into pgqueue.messages (queue_name, payload) select queue, to_jsonb(g) from generate_series(1, 1500) g;
    perform setval(q.next_sweep_at, pgqueue._to_micros(clock_timestamp() + interval '14 s')) from pgqueue.queues q where q.name = queue;
    return next isnt((select count(*) from pgqueue.peek(queue) p where p > 0), 0::bigint, format('%s: peek sees what plain SQL has sent', k));
    found := array(select c.payload from pgqueue.claim(queue, 90) c where pgqueue.ack(queue, c.id, c.claim_token));
    return next isnt(found, '{}', format('%s: a claim finds it although no sweep is due', k));
    for n in 1..200 loop
        -- Acknowledged at once, for the limits.
        found := found || array(select c.payload from pgqueue.claim(queue, 90) c where pgqueue.ack(queue, c.id, c.claim_token));
        exit when cardinality(found) = 1500;
        perform setval(q.next_sweep_at, 1) from pgqueue.queues q where q.name = queue;
    end loop;
    return next is((select count(distinct f) from unnest(found) f), 1500::bigint, format('%s: claims find what plain SQL has sent', k));
    return next unalike(coalesce(pg_temp.places(queue), ''), '%shared%', format('%s: its messages leave messages_shared', k));
end;
$$;
select pg_temp.adopts(k.kind) from kinds k where k.number is not null union all select pg_temp.adopts('dedicated');
select is((select sum(pgqueue.drop_queue(q.name)) from pgqueue.queues q where q.name ~ '^plain-sql-'), 6::numeric, 'drop_queue removes the messages of every kind');
insert into pgqueue.messages (queue_name, payload) values ('own', '1');
select is(pgqueue.drop_queue('own'), 1::bigint, 'drop_queue removes what plain SQL has sent');

-- One subtransaction locks and moves a message: the lock of another one would make a multixact.
select pgqueue.create_queue('adopting', priorities => true) is not null as made \gset
insert into pgqueue.messages (queue_name, payload) values ('adopting', '1');
declare moved cursor for select m.xmax::text as mover from pgqueue.messages_shared m where m.queue_name = 'adopting';
select pgqueue._adopt_messages(q) as adopted from pgqueue.queues q where q.name = 'adopting' \gset
fetch moved \gset
select is((select m.xmin::text from pgqueue.messages m where m.queue_name = 'adopting'), :'mover', 'the transaction that moves what plain SQL has sent is the only one that locks it');

-- A kind that plain SQL has set, and that the queue does not have, hides a message. A sweep may have passed its id.
create function pg_temp.hides(k text, wrong bigint) returns setof text language plpgsql as $$
declare
    queue constant text := 'hides-' || k;
    f pgqueue.finding;
begin
    perform pgqueue.create_queue(queue, dedicated => k = 'dedicated');
    if k <> 'dedicated' then
        perform pg_temp.alter_to(queue, k);
    end if;
    perform pgqueue.enqueue(queue, '"right"');
    insert into pgqueue.messages (queue_name, payload) values (queue, '"right"');
    select w.* into f from pgqueue.queues q, pgqueue._queue_findings(q, pgqueue._now(), '1 s') w where q.name = queue;
    return next is(f.finding, null, format('%s: doctor finds no wrong kind in messages of the queue and of plain SQL', k));
    insert into pgqueue.messages (queue_name, payload, kind) values (queue, '"wrong"', wrong);
    perform pgqueue.enqueue(queue, '"right"'); -- claims pass the id before
    for n in 1..4 loop
        perform pgqueue.ack(queue, c.id, c.claim_token) from pgqueue.claim(queue) c;
    end loop;
    update pgqueue.sweep_state s set vacant_ids = int8multirange(int8range(null, m.id + 1)), first_id = m.id + 1
    from pgqueue.messages m where m.queue_name = queue and s.queue_name = queue and m.payload = '"wrong"';
    select w.* into f from pgqueue.queues q, pgqueue._queue_findings(q, pgqueue._now(), '1 s') w where q.name = queue and w.finding = 'wrong_kind';
    return next is(f.severity, 'error', format('%s: doctor reports a message with a kind that the queue does not have', k));
    execute f.repair;
    perform setval(q.next_sweep_at, 1) from pgqueue.queues q where q.name = queue; -- a sweep is due
    return next is(array(select c.payload from pgqueue.claim(queue) c), array['"wrong"'::jsonb], format('%s: a claim finds it after the repair', k));
end;
$$;
select pg_temp.hides(k.kind, coalesce(k.number, 0) % 4 + 1) from kinds k union all select pg_temp.hides('dedicated', 2);

-- A session keeps plans that it made while the tables were empty. They must not use the further indexes.
create function pg_temp.buffers(statement text) returns int language plpgsql as $$
declare
    plan json;
begin
    execute 'explain (analyze, buffers, timing off, format json) ' || statement into plan;
    return (plan -> 0 -> 'Plan' ->> 'Shared Hit Blocks')::int + (plan -> 0 -> 'Plan' ->> 'Shared Read Blocks')::int;
end;
$$;
create function pg_temp.settles(k text) returns setof text language plpgsql as $$
declare
    queue constant text := 'deep-' || k;
    m pgqueue.message;
begin
    perform pgqueue.create_queue(queue), pg_temp.alter_to(queue, k);
    for deep in 0..1 loop
        perform pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[2 + 20000 * deep]));
        for verb in 1..2 loop
            select c.* into m from pgqueue.claim(queue) c;
            if deep = 0 then
                perform pgqueue.extend(queue, m.id, m.claim_token), pgqueue.ack(queue, m.id, m.claim_token);
            elsif verb = 1 then
                return next cmp_ok(pg_temp.buffers(format('select pgqueue.extend(%L, %s, %L)', queue, m.id, m.claim_token)), '<', 60, format('%s: extend reads no backlog', k));
            else
                return next cmp_ok(pg_temp.buffers(format('select pgqueue.ack(%L, %s, %L)', queue, m.id, m.claim_token)), '<', 60, format('%s: ack reads no backlog', k));
            end if;
        end loop;
    end loop;
end;
$$;
select pg_temp.settles(k.kind) from kinds k where k.number is not null;

select * from finish();
rollback;
