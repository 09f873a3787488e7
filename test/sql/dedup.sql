begin;
-- The lock makes test files wait for each other: this file stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.at(moment text) returns text language sql as $$ select set_config('test.now', moment || '+00', true) $$;

select plan(123);

create function pg_temp.contents(queue text) returns text[] language sql as $$
    select array(
        select m.id || ':' || coalesce(m.payload::text, encode(m.body, 'escape'))
        from (
            select id, payload, body from pgqueue.messages where queue_name = queue
            union all
            select id, payload, body from pgqueue.scheduled_messages where queue_name = queue
        ) m
        order by m.id)
$$;
create function pg_temp.count(queue text) returns bigint language sql as $$ select cardinality(pg_temp.contents(queue)) $$;

-- keep

select pgqueue.create_queue('dedup'), pgqueue.create_queue('dedup-other') \g /dev/null
select is((pgqueue.get_queue('dedup')).dedup_window, '5 min'::interval, 'the dedup_window of a queue is five minutes');
select pgqueue.enqueue('dedup', '"first"', dedup_key => 'invoice-9') as first_id \gset
select is(pgqueue.enqueue('dedup', '"second"', dedup_key => 'invoice-9'), :first_id::bigint, 'a second enqueue with a key returns the id of the first message');
select is(pg_temp.contents('dedup'), array[:first_id || ':"first"'], 'a second enqueue with a key adds no message and changes none');
select is((select s.enqueued_total from pgqueue.stats('dedup') s), 1::bigint, 'a message that is not added is not counted');
select isnt(pgqueue.enqueue('dedup', '1', dedup_key => 'invoice-10'), :first_id::bigint, 'enqueue with another key adds a message');
select isnt(pgqueue.enqueue('dedup', '1'), pgqueue.enqueue('dedup', '1'), 'messages without a key are not compared');
select isnt(pgqueue.enqueue('dedup-other', '1', dedup_key => 'invoice-9'), :first_id::bigint, 'each queue has keys of its own');
select isnt(pgqueue.enqueue('dedup', '1', dedup_key => 'INVOICE-9'), :first_id::bigint, 'keys are compared byte by byte');
select is(pgqueue.enqueue('dedup', '1', dedup_key => 'invoice-9', delay => '1 h'), :first_id::bigint, 'a delayed message is compared, too');
select is((select count(*) from pgqueue.claim('dedup', 10)), 5::bigint, 'messages with a key are claimed like others');
select is(pgqueue.enqueue('dedup', '1', dedup_key => 'invoice-9'), :first_id::bigint, 'a key stays taken while its message is in flight');
select pgqueue.purge_queue('dedup') \g /dev/null
select is(pgqueue.enqueue('dedup', '1', dedup_key => 'invoice-9'), :first_id::bigint, 'a key stays taken within the window after its message is gone');

-- The window

select pg_temp.at('2030-01-01 12:04:59.999999') \g /dev/null
select is(pgqueue.enqueue('dedup', '1', dedup_key => 'invoice-9'), :first_id::bigint, 'a key is taken until the window ends');
select pg_temp.at('2030-01-01 12:05:00') \g /dev/null
select pgqueue.enqueue('dedup', '"next"', dedup_key => 'invoice-9') as next_id \gset
select isnt(:next_id::bigint, :first_id::bigint, 'a key is free when the window ends');
select pg_temp.at('2030-01-01 12:09:00') \g /dev/null
select is(pgqueue.enqueue('dedup', '1', dedup_key => 'invoice-9'), :next_id::bigint, 'the window counts from the message that was added last');
select is(pgqueue.enqueue('dedup', '1', dedup_key => 'invoice-9', on_duplicate => 'replace'), :next_id::bigint, 'a message is replaced within the window');
select pg_temp.at('2030-01-01 12:10:00') \g /dev/null
select isnt(pgqueue.enqueue('dedup', '1', dedup_key => 'invoice-9', on_duplicate => 'replace'), :next_id::bigint, 'the window counts from the time when a message was added, not when it was replaced');

-- Windows that begin and end at different places around the end of a period.
create function pg_temp.wrong_windows(queue text, window_ interval, boundary timestamptz) returns text[] language plpgsql as $$
declare
    wrong text[] := '{}';
    first_id bigint;
    second_id bigint;
begin
    perform pgqueue.create_queue(queue, dedup_window => window_);
    for n in 0..10 loop
        perform set_config('test.now', (boundary - window_ + n * 0.1 * window_)::text, true);
        first_id := pgqueue.enqueue(queue, '1', dedup_key => n::text);
        perform set_config('test.now', (current_setting('test.now')::timestamptz + 0.999 * window_)::text, true);
        if pgqueue.enqueue(queue, '1', dedup_key => n::text) <> first_id then
            wrong := wrong || format('%s: ended early', n);
        end if;
        perform set_config('test.now', (current_setting('test.now')::timestamptz + 0.002 * window_)::text, true);
        second_id := pgqueue.enqueue(queue, '1', dedup_key => n::text);
        if second_id = first_id or pgqueue.enqueue(queue, '1', dedup_key => n::text) <> second_id then
            wrong := wrong || format('%s: did not end', n);
        end if;
    end loop;
    return wrong;
end;
$$;
select is(pg_temp.wrong_windows('dedup-' || n, w, boundary), '{}', format('a window of %s holds over the end of a period at %s', w, boundary))
from (values
    (1, '1 h'::interval, '2030-01-01 15:00:00+00'::timestamptz), (2, '7 min', '2030-01-01 15:00:00+00'),
    (3, '1 day', '2030-01-03 00:00:00+00'), (4, '61 min', '2030-01-03 00:00:00+00'),
    (5, '30 days', '2030-02-15 00:00:00+00'), (6, '25 h', '2030-02-15 00:00:00+00')
) as v (n, w, boundary);
select is(date_part('epoch', '2030-02-15 00:00:00+00'::timestamptz)::bigint % 2592000, 0::bigint, 'a period of 30 days ends at the time of the last two tests');

-- As long as the message lives

select pg_temp.at('2030-01-01 12:00:00') \g /dev/null
create function pg_temp.lives(queue text, is_dedicated boolean) returns setof text language plpgsql as $$
declare
    first_id bigint;
    got pgqueue.message;
begin
    perform pgqueue.create_queue(queue, max_attempts => 2, dedicated => is_dedicated, dedup_window => '0');
    first_id := pgqueue.enqueue(queue, '1', dedup_key => 'k');
    perform pg_temp.at('2030-01-09 12:00:00');
    return next is(pgqueue.enqueue(queue, '1', dedup_key => 'k'), first_id, queue || ': the key of a ready message is taken');
    select * into got from pgqueue.claim(queue);
    return next is(pgqueue.enqueue(queue, '1', dedup_key => 'k'), first_id, queue || ': the key of a claimed message is taken');
    perform pgqueue.nack(queue, got.id, got.claim_token, '1 h');
    return next is(pgqueue.enqueue(queue, '1', dedup_key => 'k'), first_id, queue || ': the key of a message that waits for its retry is taken');
    perform pg_temp.at('2030-01-09 13:00:01');
    select * into got from pgqueue.claim(queue);
    perform pgqueue.ack(queue, got.id, got.claim_token);
    return next isnt(pgqueue.enqueue(queue, '1', dedup_key => 'k'), first_id, queue || ': the key of an acknowledged message is free');
    select * into got from pgqueue.claim(queue);
    return next is(pgqueue.enqueue(queue, '1', dedup_key => 'k'), got.id, queue || ': a key that was taken over is taken');
    perform pgqueue.reject(queue, got.id, got.claim_token);
    return next isnt(pgqueue.enqueue(queue, '1', dedup_key => 'k'), got.id, queue || ': the key of a dead letter is free');
    return next is((select count(distinct e) from pgqueue.enqueue_batch(queue, '{1,2,3}'::jsonb[], dedup_keys => '{x,x,y}') e), 2::bigint, queue || ': a message of the same batch takes the key');
    perform pg_temp.at('2030-01-01 12:00:00');
end;
$$;
select pg_temp.lives('dedup-lives', false);
select pg_temp.lives('dedup-lives-2', true);
select pgqueue.enqueue('dedup-lives', '1', delay => '100 days', dedup_key => 'far') as far_id \gset
select pg_temp.at('2030-01-31 11:59:59') \g /dev/null
select is(pgqueue.enqueue('dedup-lives', '1', dedup_key => 'far'), :far_id::bigint, 'the key of a scheduled message is taken');
select pg_temp.at('2030-01-31 12:00:00') \g /dev/null
select isnt(pgqueue.enqueue('dedup-lives', '1', dedup_key => 'far'), :far_id::bigint, 'a key is taken for at most 30 days');

-- replace

select pg_temp.at('2030-01-01 12:00:00') \g /dev/null
create function pg_temp.replaces(queue text, is_dedicated boolean) returns setof text language plpgsql as $$
declare
    first_id bigint;
    second_id bigint;
    got pgqueue.message;
    uuids uuid[] := array[gen_random_uuid(), gen_random_uuid()];
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '10 s', dedicated => is_dedicated);
    first_id := pgqueue.enqueue(queue, '"old"', headers => '{"a": 1}', message_id => uuids[1], expires_in => '1 h', dedup_key => 'k');
    return next is(pgqueue.enqueue(queue, body => 'new', headers => '{"b": 2}', message_id => uuids[2], dedup_key => 'k', on_duplicate => 'replace'), first_id, queue || ': enqueue with on_duplicate replace returns the id of the first message');
    select * into got from pgqueue.claim(queue);
    return next is(array[got.id::text, got.payload::text, encode(got.body, 'escape'), got.headers::text, got.message_id::text, got.expires_at::text], array[first_id::text, null, 'new', '{"b": 2}', uuids[2]::text, null], queue || ': a ready message gets the content and the expiry of the second call');
    second_id := pgqueue.enqueue(queue, '"later"', delay => '1 min', dedup_key => 'k', on_duplicate => 'replace');
    return next isnt(second_id, first_id, queue || ': a claimed message is not replaced, a second one is added');
    return next is(pgqueue.enqueue(queue, '"even later"', delay => '2 min', dedup_key => 'k', on_duplicate => 'replace'), second_id, queue || ': the second message has the key');
    return next is((select array_agg(row(s.payload, s.due_at)::text) from pgqueue.scheduled_messages s where s.queue_name = queue), array[row('"even later"'::jsonb, '2030-01-01 12:02:00+00'::timestamptz)::text], queue || ': a scheduled message gets another due time');
    return next is(pgqueue.enqueue(queue, '"now"', dedup_key => 'k', on_duplicate => 'replace'), second_id, queue || ': a replacement without a delay makes a scheduled message ready');
    return next is((select array_agg(c.payload) from pgqueue.claim(queue, 10, '5 s') c), array['"now"'::jsonb], queue || ': a replacement without a delay is claimed at once');
    perform pg_temp.at('2030-01-01 12:00:30');
    return next is(pgqueue.enqueue(queue, '"again"', delay => '1 min', dedup_key => 'k', on_duplicate => 'replace'), second_id, queue || ': a message whose claim has ended is replaced');
    return next is((select row(s.id, s.payload, s.attempt_count)::text from pgqueue.scheduled_messages s where s.queue_name = queue), row(second_id, '"again"'::jsonb, 1)::text, queue || ': a replaced message moves to its due time, with its attempts');
    return next is((select s.enqueued_total from pgqueue.stats(queue) s), 2::bigint, queue || ': a replacement is not counted');
    second_id := pgqueue.enqueue(queue, '"v1"', dedup_key => 'late');
    select * into got from pgqueue.claim(queue, 10) c where c.id = second_id;
    perform pg_temp.at('2030-01-01 12:01:00');
    perform pgqueue.enqueue(queue, '"v2"', dedup_key => 'late', on_duplicate => 'replace');
    return next is(pgqueue.ack(queue, second_id, got.claim_token), false, queue || ': a consumer whose claim has ended cannot acknowledge the content that has replaced it');
    return next is((select m.payload from pgqueue.messages m where m.queue_name = queue and m.id = second_id), '"v2"', queue || ': the content that has replaced that of an ended claim stays');
    perform pg_temp.at('2030-01-01 12:00:00');
end;
$$;
select pg_temp.replaces('dedup-replace', false);
select pg_temp.replaces('dedup-replace-2', true);

-- Batches

select pgqueue.create_queue('dedup-batch') \g /dev/null
select array_agg(e) as ids from pgqueue.enqueue_batch('dedup-batch', '{1,2,3,4,5}'::jsonb[], dedup_keys => '{b,a,null,b,null}') e \gset
select is((:'ids'::bigint[])[4], (:'ids'::bigint[])[1], 'two elements of a batch with the same key get one id');
select is(pg_temp.count('dedup-batch'), 4::bigint, 'two elements of a batch with the same key add one message');
select is((select s.enqueued_total from pgqueue.stats('dedup-batch') s), 4::bigint, 'the messages added by a batch are counted');
select is((select array_agg(e) from pgqueue.enqueue_batch('dedup-batch', '{6,7}'::jsonb[], dedup_keys => '{a,b}') e), array[(:'ids'::bigint[])[2], (:'ids'::bigint[])[1]], 'a batch returns the ids of earlier messages in the order of its elements');
select is((select count(distinct e) from pgqueue.enqueue_batch('dedup-batch', '{10,11,12}'::jsonb[], delays => '{0,1 h,2 h}', dedup_keys => '{a,a,c}', on_duplicate => 'replace') e), 2::bigint, 'enqueue_batch replaces an earlier message with on_duplicate replace');
select is((select array_agg(s.payload order by s.payload) from pgqueue.scheduled_messages s where s.queue_name = 'dedup-batch'), '{11,12}'::jsonb[], 'the last element of a batch with a key replaces the message, with its own delay');
select array_agg(distinct e) as ids from pgqueue.enqueue_batch('dedup-batch', '{20,21}'::jsonb[], dedup_keys => '{z,z}', on_duplicate => 'replace') e \gset
select is((select array_agg(m.payload) from pgqueue.messages m where m.id = any (:'ids')), '{21}'::jsonb[], 'a batch with on_duplicate replace adds the last of the elements with a new key');
select count(*) from pgqueue.claim('dedup-batch', 100) \g /dev/null
select is((select count(distinct e) from pgqueue.enqueue_batch('dedup-batch', '{30,31}'::jsonb[], dedup_keys => '{z,z}', on_duplicate => 'replace') e), 1::bigint, 'elements that replace a claimed message add one message');

select pgqueue.create_queue('dedup-turn') \g /dev/null
select pg_temp.at('2030-01-01 12:54:00') \g /dev/null
select pgqueue.enqueue('dedup-turn', '0', dedup_key => 'k') as holder_id \gset
select pg_temp.at('2030-01-01 12:57:00') \g /dev/null
select is((select array_agg(e) from pgqueue.enqueue_batch('dedup-turn', '{1,2}'::jsonb[], dedup_keys => '{k,k}') e), array[:holder_id, :holder_id]::bigint[], 'all elements of a batch with a taken key get its id, also shortly before a period ends');
select is((select array_agg(e) from pgqueue.enqueue_batch('dedup-turn', '{3,4}'::jsonb[], dedup_keys => '{k,k}', on_duplicate => 'replace') e), array[:holder_id, :holder_id]::bigint[], 'all elements of a batch that replaces a message get its id, also shortly before a period ends');
select pg_temp.at('2030-01-01 13:00:30') \g /dev/null
select pgqueue.enqueue('dedup-turn', '5', dedup_key => 'k') as turn_id \gset
select is((select m.payload from pgqueue.messages m where m.id = :turn_id), '5', 'a taken key is free after its window, also if it was sent again shortly before the period ended');
select pg_temp.at('2030-01-01 12:00:00') \g /dev/null
select pgqueue.create_queue('dedup-group', group_limit => 1, dedup_window => '0') \g /dev/null
select pgqueue.enqueue('dedup-group', '"v1"', group_key => 'a', dedup_key => 'k') as waiting_id \gset
select pgqueue.nack('dedup-group', c.id, c.claim_token, '1 h') from pgqueue.claim('dedup-group') c \g /dev/null
select pgqueue.enqueue('dedup-group', v, group_key => 'a', dedup_key => 'later', on_duplicate => 'replace') from unnest('{"1","2"}'::jsonb[]) with ordinality as u (v, n) order by n \g /dev/null
select is_empty($$ select pgqueue.claim('dedup-group') $$, 'a message that is replaced passes no earlier one of its group that waits for its retry');
select is(pgqueue.enqueue('dedup-group', '"v2"', group_key => 'a', dedup_key => 'k', on_duplicate => 'replace'), :waiting_id::bigint, 'a message of a group that waits for its retry is replaced');
select is((select c.payload from pgqueue.claim('dedup-group') c), '"v2"', 'a message of a group that is replaced without a delay is ready');
select pgqueue.nack('dedup-group', m.id, m.claim_token, '1 h') from pgqueue.messages m where m.id = :waiting_id \g /dev/null
select pgqueue.enqueue('dedup-group', '"v3"', delay => '1 h', group_key => 'a', dedup_key => 'k', on_duplicate => 'replace') \g /dev/null
select is((select c.payload from pgqueue.claim('dedup-group') c), '2', 'a message that waits for its retry lets the later ones of its group pass when a replacement delays it');

-- publish

select pgqueue.subscribe('dedup.*', q) from unnest('{dedup,dedup-other}'::text[]) q \g /dev/null
select is(pgqueue.publish('dedup.paid', '1', dedup_key => 'event-1'), 2, 'publish with a key sends a copy to each queue');
select is(pgqueue.publish('dedup.paid', '2', dedup_key => 'event-1'), 2, 'a second publish counts the queues in which the key is taken');
select is((select array_agg(m.payload) from pgqueue.messages m where m.headers ->> 'pgqueue.topic' = 'dedup.paid'), '{1,1}'::jsonb[], 'a second publish with a key adds no copy');
select is(pgqueue.publish('dedup.paid', '3', dedup_key => 'event-1', on_duplicate => 'replace'), 2, 'publish replaces earlier copies with on_duplicate replace');
select is((select array_agg(m.payload) from pgqueue.messages m where m.headers ->> 'pgqueue.topic' = 'dedup.paid'), '{3,3}'::jsonb[], 'each queue has one copy with the new content');

-- Keys become free

savepoint before;
select pgqueue.enqueue('dedup', '1', dedup_key => 'rolled back') as gone_id \gset
rollback to before;
select isnt(pgqueue.enqueue('dedup', '1', dedup_key => 'rolled back'), :gone_id::bigint, 'a rollback frees the key');
select pgqueue.enqueue('dedup', '1', dedup_key => 'cancelled') as cancelled_id \gset
select is(pgqueue.cancel_by_key('dedup', 'cancelled'), true, 'cancel_by_key removes a message by its key');
select ok(:cancelled_id <> all (array(select m.id from pgqueue.messages m where m.queue_name = 'dedup')), 'the message is gone');
select is(pgqueue.cancel_by_key('dedup', 'cancelled'), false, 'cancel_by_key returns false for a key that is free');
select isnt(pgqueue.enqueue('dedup', '1', delay => '1 h', dedup_key => 'cancelled'), :cancelled_id::bigint, 'cancel_by_key frees the key');
select is(pgqueue.cancel_by_key('dedup', 'cancelled'), true, 'cancel_by_key removes a scheduled message');
select pgqueue.create_queue('dedup-claimed') \g /dev/null
select pgqueue.enqueue('dedup-claimed', '1', dedup_key => 'claimed') as claimed_id \gset
select count(*) from pgqueue.claim('dedup-claimed') \g /dev/null
select is(pgqueue.cancel_by_key('dedup-claimed', 'claimed'), false, 'cancel_by_key returns false for a claimed message');
select is(pgqueue.enqueue('dedup-claimed', '1', dedup_key => 'claimed'), :claimed_id::bigint, 'the key of a claimed message stays taken after cancel_by_key');
select pgqueue.drop_queue('dedup-claimed') \g /dev/null
select pgqueue.create_queue('dedup-claimed') \g /dev/null
select isnt(pgqueue.enqueue('dedup-claimed', '1', dedup_key => 'claimed'), :claimed_id::bigint, 'the keys of a dropped queue are free');
select is((pgqueue.alter_queue('dedup-claimed', dedup_window => '1 s')).dedup_window, '1 s'::interval, 'alter_queue sets the dedup_window');
select is((pgqueue.alter_queue('dedup-claimed', dedup_window => '0')).dedup_window, '0'::interval, 'alter_queue sets a dedup_window of 0');

-- Bad arguments

select throws_ok(format('select pgqueue.create_queue(%L, dedup_window => %L::interval)', 'dedup-bad', w), '22023', null, format('a dedup_window of %s is refused', coalesce(w, 'null')))
from unnest('{null,999 ms,30 days 1 s,-1 s,300000 years -108000000 days}'::text[]) w;
select throws_ok(format('select pgqueue.enqueue(%L, %L, dedup_key => %L)', 'dedup', '1', k), '22023', null, format('a key of %s characters is refused', char_length(k)))
from unnest(array['', repeat('x', 256)]) k;
select lives_ok(format('select pgqueue.enqueue(%L, %L, dedup_key => %L)', 'dedup', '1', repeat('ü', 255)), 'a key of 255 characters is accepted');
select throws_ok(format('select pgqueue.enqueue(%L, %L, dedup_key => %L, on_duplicate => %L)', 'dedup', '1', 'k', o), '22023', null, format('on_duplicate %s is refused', coalesce(o, 'null')))
from unnest('{null,KEEP,skip}'::text[]) o;
select pgqueue.subscribe('dedup.checked', 'dedup') \g /dev/null
select throws_ok(v, '22023', null, 'without a key another on_duplicate is refused, too: ' || v)
from unnest(array[
    $$ select pgqueue.enqueue('dedup', '1', on_duplicate => 'skip') $$,
    $$ select pgqueue.enqueue_batch('dedup', '{1}', on_duplicate => 'skip') $$,
    $$ select pgqueue.publish('nobody.there', '1', on_duplicate => 'skip') $$,
    $$ select pgqueue.publish('dedup.checked', '1', on_duplicate => 'skip') $$
]) v;
select throws_ok($$ select pgqueue.enqueue_batch('dedup', '{1,2}', dedup_keys => '{a}') $$, '22023', null, 'dedup_keys with another length than payloads are refused');
select throws_ok($$ select pgqueue.publish('nobody.there', '1', dedup_key => '') $$, '22023', null, 'publish refuses a bad key even if no queue is subscribed');
select throws_ok($$ select pgqueue.cancel_by_key('dedup', null) $$, '22023', null, 'cancel_by_key refuses a null key');
select throws_ok($$ select pgqueue.enqueue('dedup', null, dedup_key => 'k') $$, '22023', 'invalid payload: null', 'enqueue with a key refuses a message without payload and body');
select throws_ok($$ select pgqueue.enqueue('dedup', to_jsonb(repeat('x', 300000)), dedup_key => 'invoice-9') $$, 'PQ003', null, 'enqueue with a key that is taken refuses a payload over the limit');

-- The cost of a key does not grow with the number of keys.

create function pg_temp.buffers(key text) returns int language plpgsql as $$
declare
    plan json;
begin
    execute format('explain (analyze, buffers, timing off, format json) select pgqueue.enqueue(%L, %L, dedup_key => %L)', 'dedup-many', '1', key) into plan;
    return (plan -> 0 -> 'Plan' ->> 'Shared Hit Blocks')::int + (plan -> 0 -> 'Plan' ->> 'Shared Read Blocks')::int;
end;
$$;
select pgqueue.create_queue('dedup-many', dedup_window => '0') \g /dev/null
select count(*) from pgqueue.enqueue_batch('dedup-many', array(select '1'::jsonb from generate_series(1, 20000)), dedup_keys => array(select 'k' || g from generate_series(1, 20000) g)) \g /dev/null
select pg_temp.buffers('k1') \g /dev/null
select cmp_ok(pg_temp.buffers('k10000'), '<', 60, 'enqueue with a taken key reads no other keys');
select pgqueue.purge_queue('dedup-many') \g /dev/null
select pg_temp.buffers('k1') \g /dev/null
select cmp_ok(pg_temp.buffers('k10000'), '<', 250, 'enqueue with a key that is free again reads no other keys');

-- Tables whose period has ended are truncated

create function pg_temp.recorded() returns bigint language sql as $$
    select count(*) from pgqueue.dedup_keys k where k.queue_id = (select q.queue_id from pgqueue.queues q where q.name = 'dedup-sliced')
$$;
select pgqueue.create_queue('dedup-sliced') \g /dev/null
select pg_temp.at('2030-01-01 12:59:00') \g /dev/null
select pgqueue.enqueue('dedup-sliced', '1', dedup_key => 'k') as sliced_id \gset
select is(pg_temp.recorded(), 2::bigint, 'a key whose window reaches into the next period is recorded in both');
select pg_temp.at('2030-01-01 13:00:30') \g /dev/null
select pgqueue._truncate_dedup_keys(pgqueue._now()) \g /dev/null
select is(pg_temp.recorded(), 2::bigint, 'nothing is truncated in the first minute of a period');
select pg_temp.at('2030-01-01 13:01:30') \g /dev/null
create or replace function pgqueue._is_dump_running() returns boolean language sql volatile as $$ select true $$;
select pgqueue._truncate_dedup_keys(pgqueue._now()) \g /dev/null
select is(pg_temp.recorded(), 2::bigint, 'nothing is truncated while a dump runs');
create or replace function pgqueue._is_dump_running() returns boolean language sql volatile as $$ select false $$;
select pgqueue._truncate_dedup_keys(pgqueue._now()) \g /dev/null
select is(pg_temp.recorded(), 1::bigint, 'the table of the period that has ended is truncated');
select is(pgqueue.enqueue('dedup-sliced', '1', dedup_key => 'k'), :sliced_id::bigint, 'a key that is recorded for the present period stays taken after the truncation');

-- A lock of the table delays the statement that replaces a message.
select pgqueue.enqueue('dedup-sliced', '1', delay => '1 h', dedup_key => 'late') as late_id \gset
create function pg_temp.pass() returns trigger language plpgsql as $$ begin perform pg_temp.at('2030-01-01 13:02:00'); return null; end $$;
create trigger pass before update on pgqueue.scheduled_messages for each statement execute function pg_temp.pass();
select pgqueue.enqueue('dedup-sliced', '2', dedup_key => 'late', on_duplicate => 'replace') \g /dev/null
select is((select s.due_at from pgqueue.scheduled_messages s where s.id = :late_id), '2030-01-01 13:01:59.9+00', 'a replaced message is due at most 100 ms before the clock of the statement that writes it');

select * from finish();
rollback;
