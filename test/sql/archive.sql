begin;
-- The locks make test files wait for each other: this file attaches tables and stops the clock.
lock table pgqueue.messages in access exclusive mode;
lock table pgqueue.archived_messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;
create function pg_temp.days() returns text[] language sql
as $$ select coalesce(array_agg(right(i.inhrelid::regclass::text, 8) order by 1), '{}') from pg_inherits i where i.inhparent = 'pgqueue.archived_messages'::regclass $$;
create function pg_temp.confirm(at timestamptz) returns void language sql
as $$ delete from pgqueue.archive_clock; insert into pgqueue.archive_clock (checked_at, confirmed_at) values (at, at) $$;
create function pg_temp.maintain() returns text[] language sql
as $$ select coalesce(array_agg(to_char(m.day, 'MMDD ') || m.change order by m.day, m.change), '{}') from pgqueue.maintain_archive() m $$;
create function pg_temp.changes() returns text[] language plpgsql
as $$ begin perform pg_temp.confirm(pgqueue._now()); return pg_temp.maintain(); end $$;
create function pg_temp.findings() returns text[] language sql
as $$ select coalesce(array_agg(f.severity || ' ' || f.finding order by f.finding), '{}') from pgqueue.doctor() f where f.finding ~ 'archive|unfiled' $$;
create function pg_temp.last(queue text) returns pgqueue.archived_message language sql
as $$ select a from pgqueue.browse_archived_messages(queue, 1) a $$;

select plan(179);

-- The default privileges of the owner would grant rights on new tables. Archive days must not have them.
alter default privileges in schema pgqueue grant select on tables to public;
alter default privileges in schema pgqueue grant usage on sequences to public;

select is(pg_temp.days(), '{}'::text[], 'an archive has no day tables while no queue archives');
select is(pg_temp.changes(), '{}'::text[], 'maintain_archive changes nothing while no queue archives');
select is((select count(*) from pgqueue.create_queue('archive_none')), 1::bigint, 'create_queue creates a queue without an archive');
select is((pgqueue.get_queue('archive_none')).archive_for, null, 'the default of archive_for is null');
select is(pg_temp.days(), '{}'::text[], 'create_queue creates no day tables for a queue without an archive');

create function pg_temp.keeps(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    new_id bigint;
    ids bigint[];
    m pgqueue.message;
    a pgqueue.archived_message;
    s pgqueue.stream;
    b pgqueue.stream_batch;
    name constant uuid := gen_random_uuid();
    sent timestamptz;
    claimed timestamptz;
begin
    return next is((pgqueue.create_queue(queue, dedicated => has_table, archive_for => '7 days')).archive_for, interval '7 days', queue || ': create_queue returns the archive_for that it was given');
    return next is((pgqueue.get_queue(queue)).archive_for, interval '7 days', queue || ': get_queue returns archive_for');

    -- Every column of an archived message.
    sent := pgqueue._now();
    new_id := pgqueue.enqueue(queue, '{"n": 1}', headers => '{"h": 1}', expires_in => '1 day', message_id => name);
    perform pg_temp.pass('2 s');
    perform pgqueue.nack(queue, c.id, c.claim_token, '0', 'at first') from pgqueue.claim(queue) c;
    perform pg_temp.pass('1 s');
    claimed := pgqueue._now();
    select * into m from pgqueue.claim(queue, claimed_by => 'alice');
    perform pg_temp.pass('20 s');
    perform pgqueue.extend(queue, m.id, m.claim_token);
    perform pg_temp.pass('20 s');
    return next is(pgqueue.ack(queue, m.id, m.claim_token), true, queue || ': ack of a claimed message of an archiving queue returns true');
    a := pg_temp.last(queue);
    return next is((a.id, a.queue_name, a.message_id, a.attempt_count, a.max_attempts)::text, (new_id, queue, name, 2, 5)::text, queue || ': an archived message keeps its id, queue, message_id, attempt_count and max_attempts');
    return next is((a.payload, a.headers, a.body)::text, ('{"n": 1}'::jsonb, '{"h": 1}'::jsonb, null::bytea)::text, queue || ': an archived message keeps its payload, headers and body');
    return next is((a.claimed_by, a.last_error, a.expires_at)::text, ('alice', 'at first', sent + interval '1 day')::text, queue || ': an archived message keeps claimed_by, last_error and expires_at');
    return next is((a.enqueued_at, a.claimed_at, a.finished_at)::text, (sent, claimed, pgqueue._now())::text, queue || ': an archived message has the times of enqueue, claim and ack, and extend does not change claimed_at');
    return next is((select count(*) from pgqueue.messages l where l.queue_name = queue), 0::bigint, queue || ': an archived message is no longer in the queue');
    return next is(pgqueue.ack(queue, m.id, m.claim_token), false, queue || ': a second ack of an archived message returns false');
    return next is((select count(*) from pgqueue.archived_messages l where l.queue_name = queue), 1::bigint, queue || ': a message is archived once');

    -- Every function that acknowledges.
    perform pgqueue.enqueue(queue, body => '\x00ff');
    perform pgqueue.ack(queue, c.id, c.claim_token) from pgqueue.claim(queue) c;
    return next is(((pg_temp.last(queue)).body, (pg_temp.last(queue)).payload)::text, ('\x00ff'::bytea, null::jsonb)::text, queue || ': the archive keeps a raw body unchanged');

    ids := array(select pgqueue.enqueue_batch(queue, array['1', '2', '3']::jsonb[]));
    return next is((select pgqueue.ack_batch(queue, array_agg(c.id) || 0::bigint, min(c.claim_token::text)::uuid) from pgqueue.claim(queue, 3) c), 3, queue || ': ack_batch returns the number of messages that the token still claimed');
    return next is((select array_agg(l.id order by l.id) from pgqueue.browse_archived_messages(queue, 3) l), ids, queue || ': ack_batch archives the messages that it acknowledges');

    ids := array(select pgqueue.enqueue_batch(queue, array['4', '5', '6']::jsonb[]));
    select * into m from pgqueue.claim(queue);
    return next is((select array_agg((e.id, e.lost) order by e.id) from pgqueue.exchange(queue, array[m.id, 0], m.claim_token) e)::text,
        array[(0::bigint, true), (ids[2], false)]::text, queue || ': exchange reports a lost id and returns the next message');
    return next is((pg_temp.last(queue)).id, ids[1], queue || ': exchange archives the message that it acknowledges');
    return next is((select count(*) from pgqueue.exchange(queue, null, null) e), 1::bigint, queue || ': exchange with null ids acknowledges nothing and claims the next message');

    ids := array(select pgqueue.enqueue_batch(queue, array['7', '8']::jsonb[]));
    return next is((select array_agg((r.id, r.attempt_count)::text) from pgqueue.receive(queue, 2) r), array[(ids[1], 1)::text, (ids[2], 1)::text], queue || ': receive returns messages in order of id, with one attempt each');
    return next is((select array_agg(((l.id, l.attempt_count, l.claimed_at, l.finished_at)::text) order by l.id) from pgqueue.browse_archived_messages(queue, 2) l),
        array[(ids[1], 1, null::timestamptz, pgqueue._now())::text, (ids[2], 1, null::timestamptz, pgqueue._now())::text], queue || ': receive archives messages with one attempt and without claimed_at');
    return next is((select count(*) from pgqueue.messages l where l.queue_name = queue and l.id = any (ids)), 0::bigint, queue || ': what receive archives is no longer in the queue');

    -- Streams.
    ids := array(select pgqueue.enqueue_batch(queue, array['9', '10', '11', '12']::jsonb[]));
    s := pgqueue.stream_open(queue, 's');
    return next is(s.on_ack, null, queue || ': stream_open leaves on_ack null by default, so the setting of the queue applies');
    b := pgqueue.stream_claim(queue, 's', s.epoch, 0, null, 1);
    return next is(pgqueue.stream_ack(queue, 's', s.epoch, b.seq, b.claim_token), 1, queue || ': stream_ack acknowledges a batch of one message');
    return next is(((pg_temp.last(queue)).id, (pg_temp.last(queue)).claimed_by, (pg_temp.last(queue)).claimed_at)::text, (ids[1], 'stream s', pgqueue._now())::text, queue || ': stream_ack archives the batch, with the stream as claimed_by');
    b := pgqueue.stream_claim(queue, 's', s.epoch, b.seq, b.claim_token, 1);
    b := pgqueue.stream_claim(queue, 's', s.epoch, b.seq, b.claim_token, 1);
    return next is((pg_temp.last(queue)).id, ids[2], queue || ': stream_claim archives the batch that it acknowledges');
    s := pgqueue.stream_open(queue, 's', on_ack => 'delete');
    return next is(s.on_ack, 'delete', queue || ': stream_open sets on_ack to delete');
    return next is((select l.on_ack from pgqueue.list_streams(queue) l), 'delete', queue || ': list_streams shows on_ack');
    b := pgqueue.stream_claim(queue, 's', s.epoch, b.seq, b.claim_token, 1);
    return next is((pg_temp.last(queue)).id, ids[2], queue || ': a stream with on_ack delete archives nothing, including the batch that was open before');
    s := pgqueue.stream_open(queue, 's', on_ack => 'archive');
    perform pgqueue.stream_ack(queue, 's', s.epoch, b.seq, b.claim_token);
    return next is((pg_temp.last(queue)).id, ids[4], queue || ': a stream with on_ack archive archives what it acknowledges');
    return next is((select count(*) from pgqueue.messages l where l.queue_name = queue and l.claim_token is null), 0::bigint, queue || ': the stream leaves no message of the queue unclaimed');
    perform pgqueue.release(queue, array_agg(l.id), l.claim_token) from pgqueue.messages l where l.queue_name = queue group by l.claim_token;
    return next is((select count(*) from pgqueue.receive(queue, 10)), 2::bigint, queue || ': receive takes the messages that the stream released');

    -- What is not archived.
    perform pgqueue.enqueue_batch(queue, array['"no"', '"no"', '"no"', '"no"', '"no"']::jsonb[]);
    perform pgqueue.reject(queue, c.id, c.claim_token) from pgqueue.claim(queue) c;
    perform pgqueue.nack(queue, c.id, c.claim_token, '1 h') from pgqueue.claim(queue) c;
    perform pgqueue.release(queue, array[c.id], c.claim_token) from pgqueue.claim(queue) c;
    perform pgqueue.enqueue(queue, '"no"', expires_in => '1 s');
    perform pg_temp.pass('1 min');
    perform pgqueue.purge_expired(queue);
    perform pgqueue.purge_dead_messages(queue);
    perform pgqueue.purge_queue(queue);
    return next is((select count(*) from pgqueue.archived_messages l where l.queue_name = queue and l.payload = '"no"'), 0::bigint, queue || ': a message that dies, expires or is purged is not archived');
    return next is((select count(*) from pgqueue.unfiled_messages), 0::bigint, queue || ': every archived message was filed into its day');
end;
$$;
select pg_temp.keeps('archive_shared', false);
select pg_temp.keeps('archive_dedicated', true);

-- The setting of the queue at the time of the ack decides.
select lives_ok($$ select pgqueue.enqueue_batch('archive_none', array['1', '2', '3', '4']::jsonb[]) $$, 'messages are sent to a queue without an archive');
select is((select pgqueue.ack('archive_none', c.id, c.claim_token) from pgqueue.claim('archive_none') c), true, 'ack succeeds in a queue without an archive');
select is((select count(*) from pgqueue.archived_messages where queue_name = 'archive_none'), 0::bigint, 'ack in a queue without an archive archives nothing');
select is((pgqueue.alter_queue('archive_none', archive_for => '2 days')).archive_for, interval '2 days', 'alter_queue turns the archive on');
select is((select pgqueue.ack('archive_none', c.id, c.claim_token) from pgqueue.claim('archive_none') c), true, 'ack succeeds after the archive is turned on');
select is((select count(*) from pgqueue.archived_messages where queue_name = 'archive_none'), 1::bigint, 'ack archives a message after the archive is turned on');
select is((pgqueue.alter_queue('archive_none', max_attempts => 3)).archive_for, interval '2 days', 'alter_queue of another setting leaves archive_for unchanged');
select is((pgqueue.alter_queue('archive_none', archive_for => '0')).archive_for, null, 'alter_queue with archive_for 0 turns the archive off');
select is((select pgqueue.ack('archive_none', c.id, c.claim_token) from pgqueue.claim('archive_none') c), true, 'ack succeeds after the archive is turned off');
select is((select count(*) from pgqueue.archived_messages where queue_name = 'archive_none'), 1::bigint, 'ack archives nothing after the archive is turned off');
select lives_ok($$ select pgqueue.alter_queue('archive_none', archive_for => '0') $$, 'alter_queue can turn the archive off twice');
select is((select count(*) from pgqueue.archive_promises), 1::bigint, 'turning the archive off twice records one promise');
select pgqueue.create_queue('archive_behind', archive_for => '2 days') \g /dev/null
select to_jsonb(c) as clock from pgqueue.archive_clock c \gset
update pgqueue.archive_clock c set confirmed_at = pgqueue._now() + interval '40 days';
select pgqueue.drop_queue('archive_behind') \g /dev/null
select ok((select p.ends_at >= pgqueue._now() + interval '42 days' from pgqueue.archive_promises p where p.queue_name = 'archive_behind'), 'a queue that is dropped while the clock is behind keeps its archive for its whole time');
delete from pgqueue.archive_clock;
update pgqueue.archive_promises p set ends_at = pgqueue._now() where p.queue_name = 'archive_behind';
select count(*) from pgqueue.maintain_archive() \g /dev/null
select is((select count(*) from pgqueue.archive_promises p where p.queue_name = 'archive_behind'), 1::bigint, 'no promise is deleted before a time is confirmed');
delete from pgqueue.archive_clock;
insert into pgqueue.archive_clock select (jsonb_populate_record(null::pgqueue.archive_clock, :'clock'::jsonb)).*;

-- Bounds of archive_for.
select throws_ok(format('select pgqueue.create_queue(''archive_bad'', archive_for => %L)', v), '22023', null, format('create_queue refuses to archive for %s', v))
from unnest(array['0', '1 day -1 microsecond', '10 years 1 day', '-1 day', '-10 years', '300000 years -108000000 days']) v;
select throws_ok(format('select pgqueue.alter_queue(''archive_none'', archive_for => %L)', v), '22023', null, format('alter_queue refuses to archive for %s', v))
from unnest(array['1 day -1 microsecond', '10 years 1 day', '-1 day']) v;
select lives_ok($$ select pgqueue.create_queue('archive_least', archive_for => '1 day'), pgqueue.create_queue('archive_most', archive_for => '10 years') $$, 'create_queue accepts an archive_for of 1 day and of 10 years');
select lives_ok(format('select pgqueue.alter_queue(%L, archive_for => %L, expires_after_idle => %2$L)', 'archive_most', d), format('archive_for and expires_after_idle accept %s', d))
from unnest(array['3650 days', '3652 days 12:00']) d;
select throws_ok(format('select pgqueue.alter_queue(%L, %s => %L)', 'archive_most', argument, '3652 days 12:00:01'), '22023', null, argument || ' refuses a value of one second over 10 years')
from unnest(array['archive_for', 'expires_after_idle']) argument;
select throws_ok($$ select pgqueue.stream_open('archive_none', 's', on_ack => 'archive') $$, '22023', null, 'stream_open refuses on_ack archive if the queue has no archive');
select throws_ok($$ select pgqueue.stream_open('archive_shared', 's', on_ack => 'burn') $$, '22023', null, 'stream_open refuses an unknown on_ack');
select lives_ok($$ select pgqueue.drop_queue('archive_least'), pgqueue.drop_queue('archive_most') $$, 'queues that archived nothing can be dropped');
delete from pgqueue.archive_promises;

-- browse_archived_messages.
select is((select array_agg(b.id) from pgqueue.browse_archived_messages('archive_shared') b), (select array_agg(a.id order by a.id desc) from pgqueue.archived_messages a where a.queue_name = 'archive_shared'),
    'browse_archived_messages returns the newest message first');
select is((select array_agg(p.id) from (select * from pgqueue.browse_archived_messages('archive_shared', 3) union all
        select * from pgqueue.browse_archived_messages('archive_shared', 3, (select min(f.id) from pgqueue.browse_archived_messages('archive_shared', 3) f))) p),
    (select array_agg(b.id) from pgqueue.browse_archived_messages('archive_shared', 6) b), 'browse_archived_messages continues before the id that it is given');
select throws_ok($$ select pgqueue.browse_archived_messages('archive_shared', 0) $$, '22023', null, 'browse_archived_messages refuses a page of zero messages');
select throws_ok($$ select pgqueue.browse_archived_messages('archive_nowhere') $$, 'PQ001', null, 'browse_archived_messages refuses an unknown queue');

-- Day tables.
select is(pg_temp.days(), array['20300101', '20300102', '20300103', '20300104', '20300105', '20300106', '20300107', '20300108', '20300109'],
    'turning the archive on creates the day table of today and of the next eight days');
select is(pg_temp.changes(), '{}'::text[], 'maintain_archive changes nothing while all day tables exist');
select is((select array_agg(distinct a.tableoid::regclass::text) from pgqueue.archived_messages a), array['pgqueue.archived_messages_20300101'], 'an archived message lies in the day table of its finished_at');
set local timezone = 'Pacific/Kiritimati';
select is((select array_agg(distinct a.tableoid::regclass::text) from pgqueue.archived_messages a where a.finished_at >= '2030-01-01 00:00+00' and a.finished_at < '2030-01-02 00:00+00'), array['pgqueue.archived_messages_20300101'], 'a day table covers a day in UTC, whatever the TimeZone of the session');
set local datestyle = 'German';
create function pg_temp.acks_one(queue text default 'archive_shared') returns text language plpgsql as $$
begin
    perform pgqueue.enqueue(queue, '"late"');
    perform pgqueue.ack(queue, c.id, c.claim_token) from pgqueue.claim(queue) c;
    return (select a.tableoid::regclass::text from pgqueue.archived_messages a where a.queue_name = queue order by a.id desc limit 1);
end;
$$;
select set_config('test.now', '2030-01-01 23:59:59.999999+00', true) is not null as set \gset
select is(pg_temp.acks_one(), 'pgqueue.archived_messages_20300101', 'a day table takes a message acknowledged in its last microsecond, where the local date differs');
select pg_temp.pass('1 microsecond');
select is(pg_temp.acks_one(), 'pgqueue.archived_messages_20300102', 'a day table takes a message acknowledged in its first microsecond, where the local date differs');
set local timezone = 'Pacific/Pago_Pago';
select is(pg_temp.changes(), array['0110 made'], 'maintain_archive creates one day table a day later, whatever the TimeZone and the DateStyle of the session');
reset datestyle;
set local timezone = 'UTC';
select set_config('test.now', '2030-01-02 00:00:00+00', true) is not null as set \gset
select is((select pg_get_expr(c.relpartbound, c.oid) from pg_class c where c.oid = 'pgqueue.archived_messages_20300110'::regclass),
    'FOR VALUES FROM (''2030-01-10 00:00:00+00'') TO (''2030-01-11 00:00:00+00'')', 'a day table created under another TimeZone is bounded by midnight in UTC');
select is((select count(*) from pg_class c cross join lateral aclexplode(c.relacl) g where c.relname ~ '^archive' and c.relnamespace = 'pgqueue'::regnamespace and g.grantee <> c.relowner), 0::bigint, 'no role but the owner has rights on archive tables');
select is((select array_agg(distinct regexp_replace(pg_get_indexdef(i.indexrelid), '^.* USING ', '')) from pg_index i join pg_inherits h on h.inhrelid = i.indrelid where h.inhparent = 'pgqueue.archived_messages'::regclass),
    array['btree (queue_name, id)'], 'every day table has the index that browse_archived_messages uses');
select is((select count(*) from pg_inherits h where h.inhparent = 'pgqueue.archived_messages'::regclass and obj_description(h.inhrelid, 'pg_class') is null), 0::bigint, 'every day table has a comment');
select is(pg_temp.findings(), '{}'::text[], 'doctor finds nothing wrong with a maintained archive');

-- Acknowledging without a day table.
select set_config('test.now', '2030-02-01 12:00:00+00', true) is not null as set \gset
select is(pg_temp.findings() @> array['warning missing_archive_day'], true, 'doctor reports missing day tables after a month without maintenance');
create function pg_temp.unfiled(verb text) returns bigint language plpgsql as $$
declare
    m pgqueue.message;
    s pgqueue.stream;
    b pgqueue.stream_batch;
begin
    perform pgqueue.enqueue('archive_shared', '"unfiled"');
    perform setval('pgqueue.next_housekeeping_at', pgqueue._to_micros(pgqueue._now() + interval '1 min'));
    case verb
    when 'receive' then
        perform pgqueue.receive('archive_shared');
    when 'stream_ack' then
        s := pgqueue.stream_open('archive_shared', 'late');
        b := pgqueue.stream_claim('archive_shared', 'late', s.epoch, s.acked_seq, s.acked_token);
        perform pgqueue.stream_ack('archive_shared', 'late', s.epoch, b.seq, b.claim_token);
    else
        select * into m from pgqueue.claim('archive_shared');
        case verb
        when 'ack' then perform pgqueue.ack('archive_shared', m.id, m.claim_token);
        when 'ack_batch' then perform pgqueue.ack_batch('archive_shared', array[m.id], m.claim_token);
        when 'exchange' then perform pgqueue.exchange('archive_shared', array[m.id], m.claim_token);
        end case;
    end case;
    return (select count(*) from pgqueue.unfiled_messages u where u.finished_at = pgqueue._now());
end;
$$;
select is(pg_temp.unfiled(v), n, v || ' succeeds without a day table and keeps the message unfiled') from unnest(array['ack', 'ack_batch', 'exchange', 'receive', 'stream_ack']) with ordinality as u (v, n);
select is((select array_agg(distinct b.payload) from pgqueue.browse_archived_messages('archive_shared', 5) b), array['"unfiled"']::jsonb[], 'browse_archived_messages shows unfiled messages');
select is(pg_temp.findings() @> array['warning unfiled_messages'], true, 'doctor reports unfiled messages');
select is((select array_agg(distinct c) from unnest(pg_temp.changes()) c where c ~ 'made'), array['0201 made', '0202 made', '0203 made', '0204 made', '0205 made', '0206 made', '0207 made', '0208 made', '0209 made'], 'maintain_archive creates the missing day tables');
select is((select count(*) from pgqueue.unfiled_messages), 0::bigint, 'maintain_archive files the unfiled messages');
select is((select count(*) from pgqueue.archived_messages_20300201), 5::bigint, 'maintain_archive files an unfiled message into the day table of its finished_at');
select is(pg_temp.findings(), '{}'::text[], 'doctor finds nothing wrong after maintain_archive');

-- A message acknowledged while the clock was far ahead.
select lives_ok($$ insert into pgqueue.unfiled_messages (id, queue_name, enqueued_at, finished_at, attempt_count, max_attempts, payload) values (1, 'archive_shared', now(), '2099-01-01 00:00+00', 1, 5, '"ahead"') $$, 'a message with a finished_at in another century is unfiled');
select is(pg_temp.changes(), '{}'::text[], 'maintain_archive creates no day table for a finished_at far ahead');
select is((select count(*) from pgqueue.unfiled_messages), 1::bigint, 'a message with a finished_at far ahead stays unfiled');
update pgqueue.unfiled_messages set finished_at = pgqueue._now();
select is(pg_temp.changes(), '{}'::text[], 'maintain_archive creates no day table for a message of today');
select is((select count(*) from pgqueue.archived_messages_20300201), 6::bigint, 'maintain_archive files the message once its finished_at is today');

-- Retention: archive_shared and archive_dedicated 7 days.
select is(pg_temp.days(), array['20300201', '20300202', '20300203', '20300204', '20300205', '20300206', '20300207', '20300208', '20300209'], 'maintain_archive dropped the day tables of January after 7 days');
select set_config('test.now', '2030-02-08 23:59:59+00', true) is not null as set \gset
select is((select array_agg(c) from unnest(pg_temp.changes()) c where c !~ 'made'), null, 'a day table is kept until its last message is older than archive_for');
select set_config('test.now', '2030-02-09 00:00:00+00', true) is not null as set \gset
select is((select array_agg(c) from unnest(pg_temp.changes()) c where c !~ 'made'), array['0201 dropped'], 'maintain_archive drops a day table once its last message is older than archive_for');
select is(to_regclass('pgqueue.archived_messages_20300201') is null, true, 'a dropped day table does not exist any more');
select is((select count(*) from pgqueue.browse_archived_messages('archive_shared')), 0::bigint, 'messages of a dropped day table are deleted');

-- A day table is kept for the longest archive_for of any queue, including dropped queues.
select lives_ok($$ select pg_temp.acks_one(), pgqueue.alter_queue('archive_dedicated', archive_for => '30 days') $$, 'another queue sets an archive_for of 30 days');
select set_config('test.now', '2030-02-20 00:00:00+00', true) is not null as set \gset
select is((select array_agg(c) from unnest(pg_temp.changes()) c where c ~ '0209 '), null, 'a day table is kept for the longest archive_for of any queue');
select is(pgqueue.drop_queue('archive_dedicated'), 0::bigint, 'a queue with archived messages can be dropped');
select is((select array_agg(c) from unnest(pg_temp.changes()) c where c ~ '0209 '), null, 'a day table is kept for the archive_for of a dropped queue');
select is((select count(*) from pgqueue.browse_archived_messages('archive_shared')), 1::bigint, 'messages of another queue in that day table are kept as well');
select lives_ok($$ select pgqueue.drop_queue('archive_shared') $$, 'the last archiving queue can be dropped');
select is((select count(*) from pgqueue.browse_archived_messages('archive_shared')), 1::bigint, 'archived messages of a dropped queue can be browsed');
select set_config('test.now', '2030-03-11 23:59:59+00', true) is not null as set \gset
select is((select array_agg(c) from unnest(pg_temp.changes()) c where c ~ '0209 '), null, 'a day table is kept until the archive_for of the dropped queue ends');
select set_config('test.now', '2030-03-12 00:00:00+00', true) is not null as set \gset
select is((select array_agg(c) from unnest(pg_temp.changes()) c where c ~ '0209 '), array['0209 dropped'], 'a day table is dropped when the archive_for of the dropped queue has ended');
select set_config('test.now', '2030-06-01 00:00:00+00', true) is not null as set \gset
select is((select array_agg(c) from unnest(pg_temp.changes()) c where c ~ 'made'), null, 'maintain_archive creates no day table while no queue archives');
select is((pg_temp.days(), (select count(*) from pgqueue.archive_promises))::text, ('{}'::text[], 0::bigint)::text, 'no day table and no promise is left after every archive_for has ended');
select is((select count(*) from pg_class c where c.relnamespace = 'pgqueue'::regnamespace and c.relname ~ '^archives_'), 0::bigint, 'no archives_ mark of a dropped queue is left');

-- A claim succeeds although maintenance of the archive fails.
select lives_ok($$ select pgqueue.create_queue('archive_hindered', archive_for => '1 day') $$, 'a queue with an archive is created');
create function pg_temp.forbid() returns event_trigger language plpgsql as $$ begin raise 'no tables here'; end $$;
create event trigger pgqueue_test_forbid on ddl_command_start execute function pg_temp.forbid();
select set_config('test.now', '2030-08-01 00:00:00+00', true) is not null as set \gset
select throws_ok($$ select pgqueue.maintain_archive() $$, 'P0001', null, 'maintain_archive fails while an event trigger forbids new tables');
select lives_ok($$ select pgqueue.enqueue('archive_hindered', '1'), pgqueue.receive('archive_hindered') $$, 'enqueue and receive succeed while maintenance of the archive fails');
select is((select count(*) from pgqueue.unfiled_messages), 1::bigint, 'a message received while no day table can be created is kept unfiled');
drop event trigger pgqueue_test_forbid;
create function pg_temp.no_lock() returns event_trigger language plpgsql as $$ begin raise 'no lock' using errcode = '55P03'; end $$;
create event trigger pgqueue_test_no_lock on ddl_command_start execute function pg_temp.no_lock();
select is(pg_temp.maintain(), array['0801 busy'], 'maintain_archive reports today as busy when it gets no lock while it makes days');
drop event trigger pgqueue_test_no_lock;
create function pg_temp.no_space() returns trigger language plpgsql as $$ begin raise 'no space' using errcode = '53100'; end $$;
create trigger no_space before insert on pgqueue.compactions execute function pg_temp.no_space();
select setval('pgqueue.next_housekeeping_at', 1), setval(q.next_sweep_at, 1) from pgqueue.queues q where q.name = 'archive_hindered' \g /dev/null
select lives_ok($$ select pgqueue.claim('archive_hindered') $$, 'a claim succeeds while a full disk hinders the request of housekeeping');
drop trigger no_space on pgqueue.compactions;
select set_config('test.now', '2030-08-01 01:00:00+00', true) is not null as set \gset
select pgqueue.enqueue('archive_hindered', '1') is not null as sent \gset
select pgqueue._at_housekeeping_archive(pgqueue._now()) \g /dev/null
select is((select count(*) from pgqueue.archived_messages_20300801), 1::bigint, 'a claim files unfiled messages at its commit an hour after maintenance failed');
-- A null token
select pgqueue.enqueue('archive_hindered', '2') \g /dev/null
select c.id from pgqueue.claim('archive_hindered', 10) c \g /dev/null
select throws_ok($$ select pgqueue.ack(m.queue_name, m.id, null) from pgqueue.messages m where m.queue_name = 'archive_hindered' $$, '22023', null, 'ack refuses a null token in a queue with an archive');
select throws_ok($$ select pgqueue.ack_batch(m.queue_name, array[m.id], null) from pgqueue.messages m where m.queue_name = 'archive_hindered' $$, '22023', null, 'ack_batch refuses a null token in a queue with an archive');
create trigger no_space before insert on pgqueue.archived_messages execute function pg_temp.no_space();
select throws_ok($$ select pgqueue.ack(m.queue_name, m.id, m.claim_token) from pgqueue.messages m where m.queue_name = 'archive_hindered' $$, '53100', null, 'ack keeps a message that a full disk keeps from the archive');
drop trigger no_space on pgqueue.archived_messages;
select pgqueue.drop_queue('archive_hindered') is not null as dropped \gset

-- A view depends on a day table.
create view pg_temp.august_2 as select * from pgqueue.archived_messages_20300802;
select set_config('test.now', '2030-09-01 00:00:00+00', true) is not null as set \gset
select is((select array_agg(c) from unnest(pg_temp.changes()) c where c ~ '^08'), array['0801 dropped', '0802 emptied', '0803 dropped', '0804 dropped', '0805 dropped', '0806 dropped', '0807 dropped', '0808 dropped', '0809 dropped'],
    'maintain_archive empties a day table that a view depends on, and drops the other expired ones');
select is(pg_temp.days(), array['20300802'], 'maintain_archive keeps only the day table that the view depends on');
drop view pg_temp.august_2;
select is(pg_temp.changes(), array['0802 dropped'], 'maintain_archive drops the emptied day table after the view was dropped');

-- A clock that is wrong. Every day is needed for one day.
select set_config('test.now', '2031-01-10 12:00:00+00', true) is not null as set \gset
select pgqueue.create_queue('archive_clock', archive_for => '1 day') is not null as created, pg_temp.changes() is not null as changed, pg_temp.acks_one('archive_clock') as acked \gset
create function pg_temp.drops(at timestamptz) returns text[] language plpgsql
as $$ begin perform set_config('test.now', at::text, true); return array(select c from unnest(pg_temp.maintain()) c where c !~ 'made'); end $$;
select is(pg_temp.drops('2031-01-13 12:00:00+00'), '{}'::text[], 'maintain_archive drops no day by the first reading of a clock that is ahead');
select is(pg_temp.drops('2031-01-13 12:59:00+00'), '{}'::text[], 'maintain_archive drops no day by a second reading less than an hour after the first');
select is(pg_temp.drops('2031-01-10 12:10:00+00'), '{}'::text[], 'maintain_archive drops no day after the clock was set back');
select is(pg_temp.drops('2031-01-10 13:10:00+00'), '{}'::text[], 'maintain_archive drops no day that is still needed after the clock has moved on');
select is((select count(*) from pgqueue.archived_messages a where a.queue_name = 'archive_clock' and a.finished_at < '2031-01-11'), 1::bigint, 'a clock that was ahead removes no archived message');
select set_config('test.now', '2031-01-08 12:00:00+00', true) is not null as set, pg_temp.acks_one('archive_clock') as acked \gset
select pgqueue._at_housekeeping_archive(pgqueue._now()) \g /dev/null
select is((select max(a.finished_at) from pgqueue.archived_messages a where a.queue_name = 'archive_clock' and a.finished_at < '2031-01-11'), '2031-01-10 12:10:00+00', 'a message acknowledged by a clock that is behind gets the confirmed time as finished_at');
select pgqueue.enqueue('archive_clock', '1') is not null as sent, pg_temp.pass('1 s') is not null as passed \gset
select count(*) as received from pgqueue.receive('archive_clock') \gset
select is((select count(*) from pgqueue.archived_messages a where a.queue_name = 'archive_clock' and a.finished_at = '2031-01-10 12:10:00+00'), 2::bigint, 'a message received by a clock that is behind gets the confirmed time as finished_at');
select is(pg_temp.drops('2031-01-11 23:00:00+00'), '{}'::text[], 'maintain_archive drops no day by the first reading of a clock that is right again');
select is(pg_temp.drops('2031-01-12 00:30:00+00'), array['0108 dropped', '0109 dropped'], 'maintain_archive keeps a day that the confirmed time still needs');
select is(pg_temp.drops('2031-01-12 01:40:00+00'), array['0110 dropped'], 'maintain_archive drops a day once two readings an hour apart show that it has passed');

select pgqueue.drop_queue('archive_clock') is not null as dropped \gset

-- A claim empties one day at its commit: the first one that is not empty.
select pgqueue.create_queue('archive_steps', archive_for => '1 day') is not null as created, pg_temp.acks_one('archive_steps') is not null as acked \gset
select pg_temp.pass('1 day') is not null as passed, pg_temp.acks_one('archive_steps') is not null as acked_another, pg_temp.pass('5 days') is not null as passed_more \gset
select pg_temp.confirm(pgqueue._now()) \g /dev/null
select pgqueue._at_housekeeping_archive(pgqueue._now()) \g /dev/null
select is((select count(*) from pgqueue.archived_messages a where a.queue_name = 'archive_steps'), 1::bigint, 'the commit of a claim empties one day that has expired');
select pgqueue._at_housekeeping_archive(pgqueue._now()) \g /dev/null
select is((select count(*) from pgqueue.archived_messages a where a.queue_name = 'archive_steps'), 0::bigint, 'the commit of a later claim empties the next day');
-- Each computation of the expiry reads all queues.
set local track_functions = 'all';
select count(*) as expired from pgqueue._days(pgqueue._now()) \gset
select is((select f.calls from pg_stat_xact_user_functions f where f.funcname = '_archive_expiry'), 1::bigint, 'the expiry of the archive is computed once for all days');
set local track_functions = 'none';
select pgqueue.drop_queue('archive_steps') is not null as dropped \gset

-- archive_for set by a plain update.
select lives_ok($$ select pgqueue.create_queue('archive_raw') $$, 'a queue without an archive is created');
update pgqueue.queues set archive_for = '3 days' where name = 'archive_raw';
select is(pg_temp.findings() @> array['error archive_mark'], true, 'doctor reports an archive_for that was set by a plain update');
do $$ begin execute (select f.repair from pgqueue.doctor() f where f.finding = 'archive_mark'); end $$;
select is(pg_temp.findings(), '{}'::text[], 'the repair that doctor proposes removes the finding');
select is((select count(*) from pg_class c where c.relnamespace = 'pgqueue'::regnamespace and c.relname ~ '^archives_'), 1::bigint, 'the repair creates the archives_ mark of the queue');

-- Messages that wait for their day are passed without a look at the catalog.
create temporary sequence looks;
create or replace function pgqueue._has_day_partition(day date) returns boolean language plpgsql volatile as $$
begin
    return nextval('looks') > 0 and pg_partition_root(to_regclass('pgqueue.' || pgqueue._day_partition_name(day))) = 'pgqueue.archived_messages'::regclass;
end;
$$;
insert into pgqueue.unfiled_messages (id, queue_name, enqueued_at, finished_at, attempt_count, max_attempts)
select n, 'archive_raw', pgqueue._now(), pgqueue._now() + case n when 100 then interval '0' else interval '1 year' end, 1, 5 from generate_series(1, 100) n;
select pgqueue._at_housekeeping_archive(pgqueue._now()) \g /dev/null
select results_eq($$ select currval('looks'), count(*) from pgqueue.unfiled_messages u where u.queue_name = 'archive_raw' $$, $$ values (2::bigint, 99::bigint) $$, 'a message is filed behind others that wait for their day');

select * from finish();
rollback;
