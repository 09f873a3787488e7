begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(202);

create function pg_temp.findings(queue text) returns text[] language sql
as $$ select coalesce(array_agg(f.severity || ' ' || f.finding order by f.finding), '{}') from pgqueue.doctor() f where f.queue_name = queue $$;

create function pg_temp.detail(queue text) returns text language sql
as $$ select regexp_replace(string_agg(f.detail, '; '), 'since \S+ \S+,|first [0-9:]+ ago', '…') from pgqueue.doctor() f where f.queue_name = queue $$;

create function pg_temp.examines(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    m pgqueue.message;
    later pgqueue.message;
    taken pgqueue.message[];
    started_at timestamptz;
    far bigint;
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', max_attempts => 2, dedicated => has_table);
    perform pgqueue.enqueue(queue, '1');
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': doctor finds nothing wrong with a queue that has a ready message');

    perform pgqueue.pause_queue(queue);
    return next is(pg_temp.findings(queue), array['info paused_queue'], queue || ': doctor reports a paused queue');
    return next is(pg_temp.detail(queue), 'paused … 1 message ready', queue || ': doctor names one ready message in the singular');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair of paused_queue resumes the queue');

    select * into m from pgqueue.claim(queue);
    perform pg_temp.pass('89 s');
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': doctor does not report a claim that expired less than a minute ago');
    perform pg_temp.pass('2.5 s');
    return next is(pg_temp.findings(queue), array['warning stuck_claims'], queue || ': doctor reports a claim that expired over a minute ago');
    return next is(pg_temp.detail(queue), '1 claim expired, the …, and no consumer has claimed since', queue || ': doctor names one expired claim in the singular');
    select * into m from pgqueue.claim(queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': a claim resolves the finding stuck_claims');

    started_at := pgqueue._now();
    perform pgqueue.extend(queue, m.id, m.claim_token, '4 h');
    perform pg_temp.pass('1 h');
    return next ok(not pg_temp.findings(queue) @> array['warning long_claims'], queue || ': doctor does not report a claim that has been extended for an hour');
    perform pg_temp.pass('1 s');
    return next ok(pg_temp.findings(queue) @> array['warning long_claims'], queue || ': doctor reports a claim that has been extended for more than an hour');
    perform pgqueue.enqueue(queue, '2');
    select * into later from pgqueue.claim(queue);
    perform pgqueue.extend(queue, later.id, later.claim_token, '4 h');
    perform pg_temp.pass('01:00:01.5');
    return next ok(pg_temp.detail(queue) like 'messages are in flight, the first claimed and extended for 02:00:02: %', queue || ': doctor names the time of the longest claim');
    return next lives_ok((select f.repair from pgqueue.doctor() f where f.queue_name = queue and f.finding = 'long_claims'), queue || ': the query that doctor proposes for long claims runs');
    perform pgqueue.ack(queue, later.id, later.claim_token);
    perform pgqueue.alter_queue(queue, visibility_timeout => '00:12:01');
    perform pg_temp.pass('7.5 s');
    return next ok(not pg_temp.findings(queue) @> array['warning long_claims'], queue || ': doctor does not report a claim that has been extended for ten visibility timeouts');
    perform pg_temp.pass('1 s');
    return next ok(pg_temp.findings(queue) @> array['warning long_claims'], queue || ': doctor reports a claim that has been extended for more than ten visibility timeouts');
    perform pgqueue.alter_queue(queue, visibility_timeout => '30 s');
    perform pg_temp.pass('2 h 1 min');
    return next ok(not pg_temp.findings(queue) @> array['warning long_claims'], queue || ': doctor does not report an expired claim as a long one');
    update pgqueue.messages set visible_at = pgqueue._now() + interval '1 min', attempt_count = attempt_count + 1 where id = m.id;
    return next ok(not pg_temp.findings(queue) @> array['warning long_claims'], queue || ': doctor does not take the time of an earlier claim for that of a claim by plain SQL');
    perform pgqueue.purge_queue(queue);
    perform set_config('test.now', started_at::text, true);

    -- The clock was ahead by a day and is then corrected.
    perform pg_temp.pass('1 day');
    perform pgqueue.enqueue(queue, '"ahead"');
    perform pgqueue.claim(queue, 2);
    perform pgqueue.enqueue(queue, '"later"');
    perform pg_temp.pass('-1 day');
    return next is(pg_temp.findings(queue), array['warning clock_ahead'], queue || ': doctor reports messages that were sent or claimed while the clock was ahead');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair of clock_ahead resolves the finding');
    return next is((select array_agg(c.payload order by c.id) from pgqueue.claim(queue, 10) c), '{"\"ahead\"", "\"later\""}'::jsonb[], queue || ': claim returns all messages after the repair of clock_ahead');
    perform pgqueue.purge_queue(queue);
    perform pg_temp.pass('1 day');
    perform pgqueue.enqueue(queue, '"delayed"', delay => '10 s');
    perform pg_temp.pass('-1 day');
    return next is(pg_temp.findings(queue), array['warning clock_ahead'], queue || ': doctor reports messages that were delayed while the clock was ahead');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair of clock_ahead resolves the finding for a delayed message');
    perform pg_temp.pass('10 s');
    return next is((select c.payload from pgqueue.claim(queue) c), '"delayed"', queue || ': the repair of clock_ahead keeps the delay of a message');
    perform pgqueue.purge_queue(queue);
    perform pgqueue.enqueue(queue, '"released"');
    perform pgqueue.enqueue(queue, '"nacked"');
    select array_agg(c) into taken from pgqueue.claim(queue, 2, claimed_by => 'consumer') c;
    perform pg_temp.pass('3 days');
    perform pgqueue.release(queue, array[taken[1].id], taken[1].claim_token);
    perform pgqueue.nack(queue, taken[2].id, taken[2].claim_token);
    perform pg_temp.pass('-3 days');
    return next is(pg_temp.findings(queue), array['info late_retries'], queue || ': doctor reports messages that were given back while the clock was ahead');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair of late_retries resolves the finding');
    perform setval(q.next_sweep_at, 1) from pgqueue.queues q where q.name = queue; -- a sweep is due
    return next is((select array_agg(c.payload order by c.id) from pgqueue.claim(queue, 10) c), '{"\"released\"", "\"nacked\""}'::jsonb[], queue || ': claim returns these messages after the repair of late_retries');
    perform pgqueue.purge_queue(queue);
    -- The clock was ahead for less than backoff_max. Only a dead letter shows it.
    perform pgqueue.enqueue(queue, n::text::jsonb) from generate_series(1, 4) n;
    perform pgqueue.enqueue(queue, '"tomorrow"', '1 day');
    select array_agg(c) into taken from pgqueue.claim(queue, 4) c;
    perform pg_temp.pass('5 min');
    perform pgqueue.release(queue, array[taken[1].id], taken[1].claim_token);
    perform pgqueue.nack(queue, taken[2].id, taken[2].claim_token, '0');
    perform pgqueue.reject(queue, taken[3].id, taken[3].claim_token);
    perform pgqueue.reject(queue, taken[4].id, taken[4].claim_token);
    perform pgqueue.redrive(queue, ids => array[taken[3].id]);
    perform pg_temp.pass('-5 min');
    return next is(pg_temp.findings(queue), array['info dead_messages', 'info late_retries'], queue || ': doctor reports messages that wait because the clock was ahead for a moment');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue and f.finding = 'late_retries');
    return next is(pg_temp.findings(queue), array['info dead_messages'], queue || ': the repair resolves this finding, too');
    perform setval(q.next_sweep_at, 1) from pgqueue.queues q where q.name = queue; -- a sweep is due
    return next is((select array_agg(c.payload order by c.id) from pgqueue.claim(queue, 10) c), '{1,2,3}'::jsonb[], queue || ': claim returns all these messages, and none that its sender has delayed for longer');
    perform pgqueue.purge_dead_messages(queue);
    perform pgqueue.purge_queue(queue);

    -- What has no effect in this queue.
    perform pgqueue.enqueue(queue, '1', group_key => 'customer-17');
    return next is(pg_temp.findings(queue), array['info unused_group_keys'], queue || ': doctor reports a group_key in a queue without group_limit');
    perform pgqueue.purge_queue(queue);
    perform pgqueue.enqueue(queue, '1', '1 h', priority => 9);
    return next is(pg_temp.findings(queue), array['info unused_priorities'], queue || ': doctor reports a priority in a queue without priorities');
    perform pgqueue.purge_queue(queue);
    perform pgqueue.enqueue(queue, '"raw"');
    update pgqueue.messages w set attempt_count = 1, visible_at = pgqueue._now() + interval '1 day 30 s' where w.queue_name = queue;
    return next is(pg_temp.findings(queue), array['warning clock_ahead'], queue || ': doctor reports a claim by plain SQL that was made while the clock was ahead');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    return next is((select c.payload from pgqueue.claim(queue) c), '"raw"', queue || ': claim returns the message after the repair of a claim by plain SQL');
    perform pgqueue.purge_queue(queue);
    perform pgqueue.enqueue(queue, '1');
    select * into m from pgqueue.claim(queue);

    perform pgqueue.reject(queue, m.id, m.claim_token);
    return next is(pg_temp.findings(queue), array['info dead_messages'], queue || ': doctor reports dead letters');
    return next is(pg_temp.detail(queue), '1 dead letter', queue || ': doctor names one dead letter in the singular');
    return next lives_ok((select f.repair from pgqueue.doctor() f where f.queue_name = queue), queue || ': the repair that doctor proposes for dead letters can be run');
    perform pgqueue.purge_dead_messages(queue);

    perform pgqueue.enqueue(queue, '2', expires_in => '2 s');
    return next is(pg_temp.findings(queue), array['warning missing_index'], queue || ': doctor reports a missing index if messages expire');
    execute (select replace(f.repair, 'concurrently', '') from pgqueue.doctor() f where f.queue_name = queue);
    set local quote_all_identifiers = on;
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair of missing_index resolves the finding, also with quote_all_identifiers on');
    reset quote_all_identifiers;
    return next is((select array_agg(f.severity || ' ' || f.finding) from pgqueue.doctor('3 s') f where f.queue_name = queue), array['warning peek_delay_above_time_to_live'], queue || ': doctor reports a peek delay above the time to live of messages');
    perform pgqueue.expose_transport(queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': doctor finds nothing wrong with a queue that has a transport relation');
    execute format('drop index pgqueue.%I', format('messages_%s_expires', (select q.queue_id from pgqueue.queues q where q.name = queue)));
    return next is(pg_temp.findings(queue), array['warning missing_index'], queue || ': doctor reports a missing index of a transport relation');
    execute (select replace(f.repair, 'concurrently', '') from pgqueue.doctor() f where f.queue_name = queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair creates the missing index of a transport relation');
    return next ok(pgqueue.unexpose_transport(queue), queue || ': unexpose_transport drops a relation whose index was repaired');
    perform pgqueue.purge_queue(queue);
    return next is((select count(*) from pgqueue.doctor('3 s') f where f.queue_name = queue), 0::bigint, queue || ': doctor reports no peek delay if no message expires');

    insert into pgqueue.messages (id, queue_name, payload, visible_at) values (0, queue, '"misplaced"', pgqueue._now());
    return next is(pg_temp.findings(queue), array['error misplaced_messages'], queue || ': doctor reports a message below the position where claims search');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair of misplaced_messages resolves the finding');
    return next is((select c.payload from pgqueue.claim(queue) c), '"misplaced"'::jsonb, queue || ': claim returns the message after the repair of misplaced_messages');
    perform pgqueue.purge_queue(queue);

    -- Ids set by hand: one far ahead of the sequence, and the highest bigint. After the loop, a scheduled message
    -- gets the latter.
    foreach far in array array[pgqueue.enqueue(queue, '"near"') + 1000000000000000, 9223372036854775807] loop
        insert into pgqueue.messages (id, queue_name, payload, visible_at) values (far, queue, '"far"', pgqueue._now());
        return next is(pg_temp.findings(queue), array['error ids_above_sequence'], format('%s: doctor reports the id %s, which the sequence has not reached', queue, far));
        perform count(*) from pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[301]));
        return next is(pg_temp.findings(queue), array['error ids_above_sequence'], queue || ': doctor reports the id above the sequence also after 301 more messages');
        -- Claims either move past the id or fail with numeric_value_out_of_range.
        begin
            perform count(*) from pgqueue.claim(queue, 1000);
        exception when numeric_value_out_of_range then null;
        end;
        perform pgqueue.enqueue(queue, '"next"');
        execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
        return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair of ids_above_sequence gives the message another id');
        return next is((select array_agg(c.payload order by c.id) from pgqueue.claim(queue, 1000) c) @> '{"\"next\""}'::jsonb[], true, queue || ': claim returns messages sent before the repair of ids_above_sequence');
        return next ok((select pg_sequence_last_value(q.fresh_from_id) from pgqueue.queues q where q.name = queue) < far, queue || ': after the repair claims search below the id that was set by hand');
        perform pgqueue.purge_queue(queue);
    end loop;
    insert into pgqueue.scheduled_messages (id, queue_name, payload, due_at) values (far, queue, '"far"', pgqueue._now() + interval '1 s');
    return next is(pg_temp.findings(queue), array['error ids_above_sequence'], queue || ': doctor reports a scheduled message with an id above the sequence');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair gives the scheduled message another id');
    perform pgqueue.purge_queue(queue);

    insert into pgqueue.scheduled_messages (id, queue_name, payload, due_at) values (pgqueue.enqueue(queue, '"first"'), queue, '"second"', pgqueue._now());
    perform setval((select q.first_due_at from pgqueue.queues q where q.name = queue), 1);
    return next is(pg_temp.findings(queue), array['error twin_messages'], queue || ': doctor reports a scheduled message that has the id of another message');
    return next throws_ok(format('select pgqueue.claim(%L)', queue), '23505', null, queue || ': claim fails if a due message has the id of another message');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair of twin_messages resolves the finding');
    return next set_eq(format('select c.payload from pgqueue.claim(%L, 10) c', queue), '{"\"first\"", "\"second\""}'::jsonb[], queue || ': claim returns both messages after the repair of twin_messages');
    perform pgqueue.purge_queue(queue);

    perform pgqueue.enqueue(queue, '1');
    perform pgqueue.nack(queue, c.id, c.claim_token, '0') from pgqueue.claim(queue) c;
    perform pgqueue.claim(queue);
    update pgqueue.sweep_state w set vacant_ids = int8multirange(int8range(null, 5), int8range(6, pg_sequence_last_value('pgqueue.message_id') + 1)) where w.queue_name = queue;
    perform pg_temp.pass('91 s');
    return next ok(pg_temp.findings(queue) @> array['warning stuck_claims'], queue || ': doctor reports an expired claim of a message with an id in vacant_ids');
end;
$$;
select is((select count(*) from pgqueue.doctor() f where f.severity = 'error'), 0::bigint, 'doctor reports no error in a fresh installation');
-- A dedicated table is made with the indexes that messages_shared has at that time.
select pg_temp.examines('doctor_dedicated', true);
select pg_temp.examines('doctor_shared', false);

insert into pgqueue.messages (queue_name, payload) values (repeat('Doctor ', 1000), '1');
select is((select array[max(length(f.queue_name)), max(length(f.detail))] from pgqueue.doctor() f where f.finding = 'orphaned_messages'), array[131, 196], 'doctor shows the beginning of a long queue name');
select is((select f.repair ~ 'update pgqueue.messages set queue_name = <its name> where md5' from pgqueue.doctor() f where f.finding = 'orphaned_messages'), true, 'doctor does not propose to create a queue with an invalid name');
delete from pgqueue.messages where queue_name ~ '^Doctor';
insert into pgqueue.messages (queue_name, payload) values ('doctor_orphan', '1');
select is(pg_temp.findings('doctor_orphan'), array['error orphaned_messages'], 'doctor reports messages of a queue that does not exist');
create function pg_temp.adopts() returns setof text language plpgsql as $$
begin
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = 'doctor_orphan');
    return next is(pg_temp.findings('doctor_orphan'), '{}'::text[], 'the repair of orphaned_messages creates the queue');
    return next is((select c.payload from pgqueue.claim('doctor_orphan') c), '1'::jsonb, 'claim returns the message after the repair of orphaned_messages');

    alter sequence pgqueue.message_id cache 10;
    return next is((select array_agg(f.severity) from pgqueue.doctor() f where f.finding = 'sequence_cache'), array['error'], 'doctor reports a cache on the sequence of message ids');
    execute (select f.repair from pgqueue.doctor() f where f.finding = 'sequence_cache');
    return next is((select count(*) from pgqueue.doctor() f where f.finding = 'sequence_cache'), 0::bigint, 'the repair of sequence_cache resolves the finding');

    alter table pgqueue.messages_shared set (autovacuum_enabled = 0);
    return next is((select array_agg(f.severity) from pgqueue.doctor() f where f.finding = 'autovacuum_off'), array['error'], 'doctor reports a messages table without autovacuum');
    execute (select f.repair from pgqueue.doctor() f where f.finding = 'autovacuum_off');
    return next is((select count(*) from pgqueue.doctor() f where f.finding = 'autovacuum_off'), 0::bigint, 'the repair of autovacuum_off resolves the finding');
end;
$$;
select pg_temp.adopts();

-- The state after restoring or replicating only the tables: the sequence starts at 1 again. Restarting a sequence
-- locks it, so no other session takes ids from it meanwhile.
create function pg_temp.starts_anew(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    last_id bigint;
    m pgqueue.message;
    shown text[];
begin
    perform pgqueue.create_queue(queue, dedicated => has_table);
    perform count(*) from pgqueue.enqueue_batch(queue, array_fill('"old"'::jsonb, array[100]));
    select max(w.id) into last_id from pgqueue.messages w;
    alter sequence pgqueue.message_id restart with 1;
    return next is(pg_temp.findings(queue), array['error ids_above_sequence'], queue || ': doctor reports a sequence of message ids that was set back below existing messages');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair of a sequence that was set back resolves the finding');
    return next is(pgqueue.enqueue(queue, '"new"'), last_id + 1, queue || ': enqueue after the repair returns the id behind the last message');
    return next is((select count(*) from pgqueue.claim(queue, 1000)), 101::bigint, queue || ': claim returns all messages after the repair of the sequence');

    perform pgqueue.reject(queue, w.id, w.claim_token) from pgqueue.messages w where w.queue_name = queue and w.id = last_id;
    perform pgqueue.purge_queue(queue);
    alter sequence pgqueue.message_id restart with 1;
    return next is(pg_temp.findings(queue), array['error ids_above_sequence'], queue || ': doctor reports a sequence of message ids that was set back below a dead letter');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    perform pgqueue.enqueue(queue, '"new"');
    select * into m from pgqueue.claim(queue);
    return next is(m.id, last_id + 1, queue || ': enqueue after the repair returns the id behind the last dead letter');
    return next ok(pgqueue.reject(queue, m.id, m.claim_token), queue || ': a message sent after the repair can be rejected');
    return next is((select count(*) from pgqueue.browse_dead_messages(queue)), 2::bigint, queue || ': the rejected message does not replace the earlier dead letter');
    perform pgqueue.purge_dead_messages(queue);

    -- Sweeps of an empty queue have recorded which ids are vacant.
    update pgqueue.sweep_state set vacant_ids = int8multirange(int8range(null, last_id)), settled_id = last_id - 1 where queue_name = queue;
    alter sequence pgqueue.message_id restart with 1;
    return next is(pg_temp.findings(queue), array['error ids_above_sequence'], queue || ': doctor reports a sequence of message ids that was set back below vacant_ids');
    perform count(*) from pgqueue.enqueue_batch(queue, '{1,2,3}');
    return next is((select count(*) from pgqueue.claim(queue, 10)), 0::bigint, queue || ': claim does not return messages whose ids are in vacant_ids');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue and f.finding = 'ids_above_sequence');
    return next is(pg_temp.findings(queue), array['error misplaced_messages'], queue || ': doctor reports messages sent before the repair of the sequence as misplaced');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair of misplaced_messages resolves the finding for all messages');
    return next is((select count(*) from pgqueue.claim(queue, 10)), 3::bigint, queue || ': claim returns all messages after both repairs');
    perform pgqueue.purge_queue(queue);

    -- The sequence of a transport relation was set back.
    perform pgqueue.expose_transport(queue);
    execute format('alter sequence pgqueue.%I restart with 100', format('queue_%s_seq', (select q.queue_id from pgqueue.queues q where q.name = queue)));
    execute format('update pgqueue.%I set head = 100, settled_seq = 99', format('transports_%s', (select q.queue_id from pgqueue.queues q where q.name = queue)));
    perform pgqueue.enqueue(queue, '"seen"');
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': doctor finds nothing wrong with a transport relation whose sequence is ahead');
    execute format('alter sequence pgqueue.%I restart with 1', format('queue_%s_seq', (select q.queue_id from pgqueue.queues q where q.name = queue)));
    perform pgqueue.enqueue(queue, '"hidden"');
    return next is(pg_temp.findings(queue), array['error ids_above_sequence'], queue || ': doctor reports the sequence of a transport relation that was set back');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair of the relation''s sequence resolves the finding');
    -- The view of the relation reads the real clock.
    update pgqueue.messages set visible_at = '2020-01-01' where queue_name = queue;
    execute format('select array_agg(convert_from(r.body, ''UTF8'') order by r.seq) from public.%I r', queue) into shown;
    return next is(shown, array['"seen"', '"hidden"'], queue || ': the relation shows all messages after the repair');
    update pgqueue.transports set next_at = clock_timestamp() + interval '1 day' where queue_name = queue;
    execute format('select count(*) from public.%I r', queue);
    return next is((select t.next_at from pgqueue.transports t where t.queue_name = queue), pgqueue._now() + interval '1 s',
        queue || ': a read of the relation corrects a next_at that was set while the clock was ahead');
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': after that read doctor has no finding');
    perform pgqueue.drop_queue(queue);
end;
$$;
select pg_temp.starts_anew('doctor_anew_shared', false);
select pg_temp.starts_anew('doctor_anew_dedicated', true);

create function pg_temp.numbers_anew() returns setof text language plpgsql as $$
begin
    perform pgqueue.create_queue('doctor_numbered');
    alter sequence pgqueue.queue_id restart with 1;
    return next is((select f.severity || ' ' || f.finding from pgqueue.doctor() f where f.detail ~ 'queue_id'), 'error ids_above_sequence', 'doctor reports a sequence of queue ids that was set back');
    execute (select f.repair from pgqueue.doctor() f where f.detail ~ 'queue_id');
    return next is((select count(*) from pgqueue.doctor() f where f.detail ~ 'queue_id'), 0::bigint, 'the repair of the sequence of queue ids resolves the finding');
    return next lives_ok($_$ select pgqueue.create_queue('doctor_numbered_next') $_$, 'create_queue succeeds after the repair of the sequence of queue ids');
end;
$$;
select pg_temp.numbers_anew();

-- The state after pg_upgrade: two functions still have the form for the other major version.
create function pg_temp.comes_from_another_major() returns setof text language plpgsql as $$
begin
    return next is((select count(*) from pgqueue.doctor() f where f.finding = 'unfit_keys'), 0::bigint, 'the key functions fit the major version of the server');
    if current_setting('server_version_num')::int < 170000 then
        create or replace function pgqueue._lookup_keys(queue_name text, inout ids bigint[], out id bigint, out names text[]) returns setof record
        language sql immutable parallel safe as ' select ids, null::bigint, null::text[] ';
        create or replace function pgqueue._matches_key(queue_name text, id bigint, name text, key_names text[], key_ids bigint[], key_id bigint) returns boolean
        language sql immutable parallel safe as ' select queue_name = name and id = any (key_ids) ';
    else
        create or replace function pgqueue._lookup_keys(queue_name text, inout ids bigint[], out id bigint, out names text[]) returns setof record
        language sql immutable parallel safe as ' select null::bigint[], i, array[queue_name] from unnest(ids) as i order by i ';
        create or replace function pgqueue._matches_key(queue_name text, id bigint, name text, key_names text[], key_ids bigint[], key_id bigint) returns boolean
        language sql immutable parallel safe as ' select queue_name = any (key_names) and id = key_id and (queue_name = name or queue_name = coalesce(name, '''')) ';
    end if;
    return next is((select f.severity from pgqueue.doctor() f where f.finding = 'unfit_keys'), 'warning', 'doctor reports key functions that fit another major version');
    perform pgqueue.create_queue('doctor_moved');
    perform count(*) from pgqueue.enqueue_batch('doctor_moved', '{1,2,3}');
    return next is((select count(*) from pgqueue.claim('doctor_moved', 2)), 2::bigint, 'claim works with key functions that fit another major version');
    execute (select f.repair from pgqueue.doctor() f where f.finding = 'unfit_keys');
    return next is((select count(*) from pgqueue.doctor() f where f.finding = 'unfit_keys'), 0::bigint, 'the repair of unfit_keys resolves the finding');
    return next is((select count(*) from pgqueue.claim('doctor_moved', 2)), 1::bigint, 'claim returns the last message after the repair of unfit_keys');
    return next is(
        (select array_agg(p.proname::text order by p.proname) from pg_proc p where p.pronamespace = 'pgqueue'::regnamespace and p.proname in ('_lookup_keys', '_matches_key')
            and not exists (select from aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a where a.grantee = 0)),
        array['_lookup_keys', '_matches_key'], 'PUBLIC cannot execute the key functions that the repair created');
end;
$$;
select pg_temp.comes_from_another_major();

-- Groups that wait for a message which is hidden.
select pgqueue.create_queue('doctor_group', group_limit => 1), pgqueue.enqueue('doctor_group', '1', group_key => 'a') as first \gset
create function pg_temp.finds_hidden(first bigint) returns setof text language plpgsql as $$
declare
    queue constant text := 'doctor_group';
begin
    perform pgqueue.nack(queue, c.id, c.claim_token, '2 h') from pgqueue.claim(queue) c;
    return next is(array_remove(pg_temp.findings(queue), 'warning long_writer'), '{}'::text[], 'doctor does not report a message that waits for its retry and keeps no other waiting');
    perform pgqueue.enqueue(queue, '2', group_key => 'a');
    perform pgqueue.enqueue(queue, '3', group_key => 'a');
    return next is(array_remove(pg_temp.findings(queue), 'warning long_writer'), array['warning held_group'], 'doctor reports a group that waits for a retry for longer than backoff_max');
    return next is((select f.detail from pgqueue.doctor() f where f.queue_name = queue and f.finding = 'held_group'), format('group ''a'' waits for message %s, which is hidden until %s', first, pgqueue._now() + interval '2 h'), 'doctor names the message for which a group waits');
    perform pg_temp.pass('01:00:01');
    return next is(array_remove(pg_temp.findings(queue), 'warning long_writer'), array['warning held_group'], 'doctor does not take the wait for a retry for a long claim');
    perform pg_temp.pass('49 min');
    return next is(array_remove(pg_temp.findings(queue), 'warning long_writer'), '{}'::text[], 'doctor does not report a group that waits for no longer than backoff_max');
    perform pg_temp.pass('11 min');
    perform pgqueue.nack(queue, c.id, c.claim_token, '10 years') from pgqueue.claim(queue) c;
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue and f.finding = 'held_group');
    return next is((select c.payload from pgqueue.claim(queue) c), '1'::jsonb, 'the repair of held_group makes the message ready');
    perform pgqueue.ack(queue, b.id, b.claim_token) from pgqueue.messages b where b.queue_name = queue and b.claim_token is not null;
    update pgqueue.messages b set visible_at = 'infinity' where b.queue_name = queue and b.payload = '2';
    return next is(array_remove(pg_temp.findings(queue), 'warning long_writer'), array['warning held_group'], 'doctor reports a group that waits for a message that plain SQL has hidden for ever');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue and f.finding = 'held_group');
    return next is((select c.payload from pgqueue.claim(queue) c), '2'::jsonb, 'the repair of held_group shows a message that was hidden for ever');
    update pgqueue.messages b set visible_at = 'infinity' where b.queue_name = queue and b.payload = '2';
    return next is(array_remove(pg_temp.findings(queue), 'warning long_writer'), array['warning held_group'], 'doctor reports a group that waits for a claim without end');
    perform pgqueue.purge_queue(queue);
    perform pgqueue.enqueue(queue, '4', group_key => 'a');
    perform pgqueue.reject(queue, c.id, c.claim_token) from pgqueue.claim(queue) c;
    perform pg_temp.pass('1 day');
    perform pgqueue.redrive(queue);
    perform pg_temp.pass('-1 day');
    return next is(array_remove(pg_temp.findings(queue), 'warning long_writer'), array['info late_retries'], 'doctor reports a message of a group that was redriven while the clock was ahead');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue and f.finding = 'late_retries');
    return next is((select c.payload from pgqueue.claim(queue) c), '4'::jsonb, 'the repair of late_retries makes the message ready');
    perform pgqueue.drop_queue(queue);
end;
$$;
select pg_temp.finds_hidden(:first);

-- With such a DateStyle a session writes IST for India and Israel alike. A repair must not depend on that.
savepoint style;
set local test.now = '2030-05-07 12:00:00+00';
select pgqueue.create_queue('doctor_style') is not null as made \gset
select pgqueue.enqueue('doctor_style', '1') as sent \gset
set local test.now = '2030-05-06 12:00:00+00';
set local datestyle = 'SQL, DMY';
set local timezone = 'Asia/Kolkata';
select f.repair from pgqueue.doctor() f where f.finding = 'clock_ahead' \gexec
select is((select m.visible_at from pgqueue.messages m where m.queue_name = 'doctor_style'), '2030-05-06 12:00:00+00'::timestamptz, 'a timestamp in a repair means the same in every session');
rollback to style;

-- As many dedicated queues as max_locks_per_transaction, less the 16 locks that doctor leaves for other tables.
select count(*) from (
    select pgqueue.create_queue('doctor_locks_' || n, dedicated => true)
    from generate_series(1, current_setting('max_locks_per_transaction')::int - 16 - (select count(*) from pgqueue.queues q where q.dedicated)) n
) c;
select is((select count(*) from pgqueue.doctor() f where f.finding = 'few_locks'), 0::bigint, 'doctor does not report few_locks while there are enough locks for all dedicated queues');
select pgqueue.create_queue('doctor_locks', dedicated => true);
select is((select f.severity || ' ' || f.repair from pgqueue.doctor() f where f.finding = 'few_locks'),
    format('warning alter system set max_locks_per_transaction = %s; -- and restart the server', 64 * (current_setting('max_locks_per_transaction')::int / 32 + 1)),
    'doctor reports few_locks if there is one dedicated queue too many');
select is((select count(*) from pgqueue.doctor() f where f.severity not in ('error', 'warning', 'info') or f.finding !~ '^[a-z_]+$' or f.detail is null or f.repair is null), 0::bigint,
    'every finding has a known severity, a name, a detail and a repair');
select matches(pgqueue.version(), '^\d+\.\d+\.\d+(-dev)?$', 'version returns a version of three numbers');
select is(pgqueue.version(), coalesce((select e.extversion from pg_extension e where e.extname = 'pgqueue'), pgqueue.version()), 'version returns the version of the extension, if pgqueue is installed as an extension');

select pgqueue.create_queue('grouped', group_limit => 1), pgqueue.create_queue('ranked', priorities => true) \g /dev/null
select pgqueue.enqueue('grouped', '1', group_key => 'a'), pgqueue.enqueue('ranked', '1', priority => 9) \g /dev/null
select is(pg_temp.findings('grouped') || pg_temp.findings('ranked'), '{}', 'doctor does not report keys in a queue that observes them');

create function pg_temp.toast_reads() returns numeric language sql
as $$ select sum(pg_stat_get_xact_blocks_fetched(c.reltoastrelid)) from pg_class c where c.relname like 'messages\_%' and c.reltoastrelid <> 0 $$;
select pgqueue.create_queue('stored_apart') \g /dev/null
select pgqueue.enqueue('stored_apart', body => string_agg(sha256(n::text::bytea), '')) from generate_series(1, 4000) n \g /dev/null
select pg_temp.toast_reads() as reads \gset
select pg_temp.findings('stored_apart') \g /dev/null
select is(pg_temp.toast_reads(), :reads::numeric, 'doctor does not read the bodies of messages');

select * from finish();
rollback;
