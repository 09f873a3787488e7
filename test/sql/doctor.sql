begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(139);

create function pg_temp.findings(queue text) returns text[] language sql
as $$ select coalesce(array_agg(f.severity || ' ' || f.finding order by f.finding), '{}') from pgqueue.doctor() f where f.queue_name = queue $$;

create function pg_temp.examines(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    m pgqueue.message;
    far bigint;
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', max_attempts => 2, dedicated => has_table);
    perform pgqueue.enqueue(queue, '1');
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': nothing hurts a queue with a message');

    perform pgqueue.pause_queue(queue);
    return next is(pg_temp.findings(queue), array['info paused_queue'], queue || ': a paused queue is found');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair resumes it');

    select * into m from pgqueue.claim(queue);
    perform pg_temp.pass('89 s');
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': a claim that ran out just now is nothing to worry about');
    perform pg_temp.pass('2 s');
    return next is(pg_temp.findings(queue), array['warning stuck_claims'], queue || ': a claim that ran out a minute ago, and that nobody took over, is found');
    select * into m from pgqueue.claim(queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': a claim repairs that');

    -- The clock was ahead by a day, and is set right.
    perform pgqueue.purge_queue(queue);
    perform pg_temp.pass('1 day');
    perform pgqueue.enqueue(queue, '"ahead"');
    perform pgqueue.claim(queue, 2);
    perform pgqueue.enqueue(queue, '"later"');
    perform pg_temp.pass('-1 day');
    return next is(pg_temp.findings(queue), array['warning clock_ahead'], queue || ': what was sent and claimed while the clock was ahead is found');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair lets go of it');
    return next is((select array_agg(c.payload order by c.id) from pgqueue.claim(queue, 10) c), '{"\"ahead\"", "\"later\""}'::jsonb[], queue || ': so that it is claimed');
    perform pgqueue.purge_queue(queue);
    perform pgqueue.enqueue(queue, '1');
    select * into m from pgqueue.claim(queue);

    perform pgqueue.reject(queue, m.id, m.claim_token);
    return next is(pg_temp.findings(queue), array['info dead_messages'], queue || ': dead letters are found');
    return next lives_ok((select f.repair from pgqueue.doctor() f where f.queue_name = queue), queue || ': what is said about them can be run');
    perform pgqueue.purge_dead_messages(queue);

    perform pgqueue.enqueue(queue, '2', expires_in => '2 s');
    return next is(pg_temp.findings(queue), array['warning missing_index'], queue || ': where messages expire and no index goes by that, it is found');
    execute (select replace(f.repair, 'concurrently', '') from pgqueue.doctor() f where f.queue_name = queue);
    set local quote_all_identifiers = on;
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair makes it, however names are shown, and messages that live for longer than consumers wait are no finding');
    reset quote_all_identifiers;
    return next is((select array_agg(f.severity || ' ' || f.finding) from pgqueue.doctor('3 s') f where f.queue_name = queue), array['warning peek_delay_above_time_to_live'], queue || ': a peek delay above the time to live is found');
    perform pgqueue.expose_transport(queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': where it is exposed, it has the index of its relation');
    execute format('drop index pgqueue.%I', format('messages_%s_expires', (select q.queue_id from pgqueue.queues q where q.name = queue)));
    return next is(pg_temp.findings(queue), array['warning missing_index'], queue || ': that one is missed, too');
    execute (select replace(f.repair, 'concurrently', '') from pgqueue.doctor() f where f.queue_name = queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair makes it');
    return next ok(pgqueue.unexpose_transport(queue), queue || ': and the relation can go');
    perform pgqueue.purge_queue(queue);
    return next is((select count(*) from pgqueue.doctor('3 s') f where f.queue_name = queue), 0::bigint, queue || ': and not without such messages');

    insert into pgqueue.messages (id, queue_name, payload, visible_at) values (0, queue, '"misplaced"', pgqueue._now());
    return next is(pg_temp.findings(queue), array['error misplaced_messages'], queue || ': a message that was put where no claim looks is found');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': there is a repair for it');
    return next is((select c.payload from pgqueue.claim(queue) c), '"misplaced"'::jsonb, queue || ': after which it is delivered');
    perform pgqueue.purge_queue(queue);

    -- Ids that were set by hand, so far off that ids would run out, as far as can be, and of a message that is scheduled.
    foreach far in array array[pgqueue.enqueue(queue, '"near"') + 1000000000000000, 9223372036854775807] loop
        insert into pgqueue.messages (id, queue_name, payload, visible_at) values (far, queue, '"far"', pgqueue._now());
        return next is(pg_temp.findings(queue), array['error ids_above_sequence'], format('%s: the id %s, which the sequence has not reached, is found', queue, far));
        perform count(*) from pgqueue.enqueue_batch(queue, array_fill('1'::jsonb, array[301]));
        return next is(pg_temp.findings(queue), array['error ids_above_sequence'], queue || ': however many messages there are');
        -- Where it has been claimed, or cannot be.
        begin
            perform count(*) from pgqueue.claim(queue, 1000);
        exception when numeric_value_out_of_range then null;
        end;
        perform pgqueue.enqueue(queue, '"next"');
        execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
        return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair gives it another');
        return next is((select array_agg(c.payload order by c.id) from pgqueue.claim(queue, 1000) c) @> '{"\"next\""}'::jsonb[], true, queue || ': after which what was sent behind it is claimed at once');
        return next ok((select pg_sequence_last_value(q.fresh_from_id) from pgqueue.queues q where q.name = queue) < far, queue || ': without a walk up there');
        perform pgqueue.purge_queue(queue);
    end loop;
    insert into pgqueue.scheduled_messages (id, queue_name, payload, due_at) values (far, queue, '"far"', pgqueue._now() + interval '1 s');
    return next is(pg_temp.findings(queue), array['error ids_above_sequence'], queue || ': a scheduled message with such an id is found');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair gives that another, too');
    perform pgqueue.purge_queue(queue);

    insert into pgqueue.scheduled_messages (id, queue_name, payload, due_at) values (pgqueue.enqueue(queue, '"first"'), queue, '"second"', pgqueue._now());
    perform setval((select q.first_due_at from pgqueue.queues q where q.name = queue), 1);
    return next is(pg_temp.findings(queue), array['error twin_messages'], queue || ': a scheduled message with the id of another is found');
    return next throws_ok(format('select pgqueue.claim(%L)', queue), '23505', null, queue || ': on which claims fail');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair gives it another id');
    return next set_eq(format('select c.payload from pgqueue.claim(%L, 10) c', queue), '{"\"first\"", "\"second\""}'::jsonb[], queue || ': after which both are delivered');
    perform pgqueue.purge_queue(queue);

    perform pgqueue.enqueue(queue, '1');
    perform pgqueue.nack(queue, c.id, c.claim_token, '0') from pgqueue.claim(queue) c;
    perform pgqueue.claim(queue);
    update pgqueue.sweep_state w set vacant_ids = int8multirange(int8range(null, pg_sequence_last_value('pgqueue.message_id') + 1)) where w.queue_name = queue;
    perform pg_temp.pass('91 s');
    return next ok(pg_temp.findings(queue) @> array['warning stuck_claims'], queue || ': a claim that ran out is found also of a message that came back, to below the head');
end;
$$;
select is((select count(*) from pgqueue.doctor() f where f.severity = 'error'), 0::bigint, 'a fresh installation has no errors');
select pg_temp.examines('doctor_shared', false);
select pg_temp.examines('doctor_dedicated', true);

insert into pgqueue.messages (queue_name, payload) values ('doctor_orphan', '1');
select is(pg_temp.findings('doctor_orphan'), array['error orphaned_messages'], 'messages of a queue that does not exist are found');
create function pg_temp.adopts() returns setof text language plpgsql as $$
begin
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = 'doctor_orphan');
    return next is(pg_temp.findings('doctor_orphan'), '{}'::text[], 'the repair creates the queue');
    return next is((select c.payload from pgqueue.claim('doctor_orphan') c), '1'::jsonb, 'which then delivers them');

    alter sequence pgqueue.message_id cache 10;
    return next is((select array_agg(f.severity) from pgqueue.doctor() f where f.finding = 'sequence_cache'), array['error'], 'a sequence that hands out ids in advance is found');
    execute (select f.repair from pgqueue.doctor() f where f.finding = 'sequence_cache');
    return next is((select count(*) from pgqueue.doctor() f where f.finding = 'sequence_cache'), 0::bigint, 'the repair stops it');

    alter table pgqueue.messages_shared set (autovacuum_enabled = 0);
    return next is((select array_agg(f.severity) from pgqueue.doctor() f where f.finding = 'autovacuum_off'), array['error'], 'a table without autovacuum is found');
    execute (select f.repair from pgqueue.doctor() f where f.finding = 'autovacuum_off');
    return next is((select count(*) from pgqueue.doctor() f where f.finding = 'autovacuum_off'), 0::bigint, 'the repair gives it back');
end;
$$;
select pg_temp.adopts();

-- The state after restoring or replicating only the tables: the sequence starts at 1 again.
-- Restarting a sequence locks it, so no other session takes ids from it meanwhile.
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
    return next is(pg_temp.findings(queue), array['error ids_above_sequence'], queue || ': a sequence that was set back below messages is found');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair sets it');
    return next is(pgqueue.enqueue(queue, '"new"'), last_id + 1, queue || ': behind them');
    return next is((select count(*) from pgqueue.claim(queue, 1000)), 101::bigint, queue || ': and all are claimed');

    perform pgqueue.reject(queue, w.id, w.claim_token) from pgqueue.messages w where w.queue_name = queue and w.id = last_id;
    perform pgqueue.purge_queue(queue);
    alter sequence pgqueue.message_id restart with 1;
    return next is(pg_temp.findings(queue), array['error ids_above_sequence'], queue || ': or below a dead letter');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    perform pgqueue.enqueue(queue, '"new"');
    select * into m from pgqueue.claim(queue);
    return next is(m.id, last_id + 1, queue || ': what is sent then');
    return next ok(pgqueue.reject(queue, m.id, m.claim_token), queue || ': may die');
    return next is((select count(*) from pgqueue.browse_dead_messages(queue)), 2::bigint, queue || ': and does not take its place');
    perform pgqueue.purge_dead_messages(queue);

    -- A queue that is empty has learnt where nothing lies.
    update pgqueue.sweep_state set vacant_ids = int8multirange(int8range(null, last_id)), settled_id = last_id - 1 where queue_name = queue;
    alter sequence pgqueue.message_id restart with 1;
    return next is(pg_temp.findings(queue), array['error ids_above_sequence'], queue || ': or below what sweeps have learnt');
    perform count(*) from pgqueue.enqueue_batch(queue, '{1,2,3}');
    return next is((select count(*) from pgqueue.claim(queue, 10)), 0::bigint, queue || ': where nobody finds what is sent');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue and f.finding = 'ids_above_sequence');
    return next is(pg_temp.findings(queue), array['error misplaced_messages'], queue || ': what was sent already is found');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': all of it at once');
    return next is((select count(*) from pgqueue.claim(queue, 10)), 3::bigint, queue || ': and delivered');
    perform pgqueue.purge_queue(queue);

    -- So has a relation.
    perform pgqueue.expose_transport(queue);
    execute format('alter sequence pgqueue.%I restart with 100', format('queue_%s_seq', (select q.queue_id from pgqueue.queues q where q.name = queue)));
    execute format('update pgqueue.%I set head = 100, settled_seq = 99', format('transports_%s', (select q.queue_id from pgqueue.queues q where q.name = queue)));
    perform pgqueue.enqueue(queue, '"seen"');
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': a relation whose sequence is ahead is well');
    execute format('alter sequence pgqueue.%I restart with 1', format('queue_%s_seq', (select q.queue_id from pgqueue.queues q where q.name = queue)));
    perform pgqueue.enqueue(queue, '"hidden"');
    return next is(pg_temp.findings(queue), array['error ids_above_sequence'], queue || ': one that was set back is found');
    execute (select f.repair from pgqueue.doctor() f where f.queue_name = queue);
    return next is(pg_temp.findings(queue), '{}'::text[], queue || ': the repair sets it');
    -- By the clock of the wall, which a view goes by.
    update pgqueue.messages set visible_at = '2020-01-01' where queue_name = queue;
    execute format('select array_agg(convert_from(r.body, ''UTF8'') order by r.seq) from public.%I r', queue) into shown;
    return next is(shown, array['"seen"', '"hidden"'], queue || ': and shows what it hid');
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
    return next is((select f.severity || ' ' || f.finding from pgqueue.doctor() f where f.detail ~ 'queue_id'), 'error ids_above_sequence', 'a sequence of queues that was set back is found');
    execute (select f.repair from pgqueue.doctor() f where f.detail ~ 'queue_id');
    return next is((select count(*) from pgqueue.doctor() f where f.detail ~ 'queue_id'), 0::bigint, 'the repair sets it');
    return next lives_ok($_$ select pgqueue.create_queue('doctor_numbered_next') $_$, 'so that queues can be made');
end;
$$;
select pg_temp.numbers_anew();

-- As after pg_upgrade: the functions are still as the other major wants them.
create function pg_temp.comes_from_another_major() returns setof text language plpgsql as $$
begin
    return next is((select count(*) from pgqueue.doctor() f where f.finding = 'unfit_keys'), 0::bigint, 'messages are looked up as suits the server');
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
    return next is((select f.severity from pgqueue.doctor() f where f.finding = 'unfit_keys'), 'warning', 'as suits another one, that is found');
    perform pgqueue.create_queue('doctor_moved');
    perform count(*) from pgqueue.enqueue_batch('doctor_moved', '{1,2,3}');
    return next is((select count(*) from pgqueue.claim('doctor_moved', 2)), 2::bigint, 'though all goes on');
    execute (select f.repair from pgqueue.doctor() f where f.finding = 'unfit_keys');
    return next is((select count(*) from pgqueue.doctor() f where f.finding = 'unfit_keys'), 0::bigint, 'the repair makes them fit');
    return next is((select count(*) from pgqueue.claim('doctor_moved', 2)), 1::bigint, 'and nothing is lost');
    return next is(
        (select array_agg(p.proname::text order by p.proname) from pg_proc p where p.pronamespace = 'pgqueue'::regnamespace and p.proname in ('_lookup_keys', '_matches_key')
            and not exists (select from aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a where a.grantee = 0)),
        array['_lookup_keys', '_matches_key'], 'nor shown to anybody');
end;
$$;
select pg_temp.comes_from_another_major();

-- Between Jerusalem and Calcutta, which both call their time IST, as far as a session writes that.
savepoint style;
set local test.now = '2030-05-07 12:00:00+00';
select pgqueue.create_queue('doctor_style') is not null as made \gset
select pgqueue.enqueue('doctor_style', '1') as sent \gset
set local test.now = '2030-05-06 12:00:00+00';
set local datestyle = 'SQL, DMY';
set local timezone = 'Asia/Kolkata';
select f.repair from pgqueue.doctor() f where f.finding = 'clock_ahead' \gexec
select is((select m.visible_at from pgqueue.messages m where m.queue_name = 'doctor_style'), '2030-05-06 12:00:00+00'::timestamptz, 'a moment in a repair is the same to every session');
rollback to style;

-- One for each lock that a connection has, but for the 16 that are not of such queues.
select count(*) from (
    select pgqueue.create_queue('doctor_locks_' || n, dedicated => true)
    from generate_series(1, current_setting('max_locks_per_transaction')::int - 16 - (select count(*) from pgqueue.queues q where q.dedicated)) n
) c;
select is((select count(*) from pgqueue.doctor() f where f.finding = 'few_locks'), 0::bigint, 'as many dedicated queues as there are locks for are no finding');
select pgqueue.create_queue('doctor_locks', dedicated => true);
select is((select f.severity || ' ' || f.repair from pgqueue.doctor() f where f.finding = 'few_locks'),
    format('warning alter system set max_locks_per_transaction = %s; -- and restart the server', 64 * (current_setting('max_locks_per_transaction')::int / 32 + 1)),
    'one more is');
select is((select count(*) from pgqueue.doctor() f where f.severity not in ('error', 'warning', 'info') or f.finding !~ '^[a-z_]+$' or f.detail is null or f.repair is null), 0::bigint,
    'every finding has a severity, a word, a detail and a repair');
select matches(pgqueue.version(), '^\d+\.\d+\.\d+$', 'the version has three parts');
select is(pgqueue.version(), coalesce((select e.extversion from pg_extension e where e.extname = 'pgqueue'), pgqueue.version()), 'it is that of the extension, where there is one');

select * from finish();
rollback;
