begin;
-- Files take turns: this one attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(45);

-- Three dead letters by crash, one rejected.
create function pg_temp.die(queue text) returns bigint[] language plpgsql as $$
declare
    ids bigint[];
    m pgqueue.message;
begin
    ids := array(select pgqueue.enqueue_batch(queue, array['{"n": 1}', '{"n": 2}', '{"n": 3}']::jsonb[], headers => array['{"h": 1}', null, null]::jsonb[], expires_in => '1 day'));
    perform pgqueue.claim(queue, 3);
    perform pg_temp.pass('31 s');
    perform pgqueue.claim(queue, 3);
    perform pgqueue.enqueue(queue, '{"n": 4}');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.reject(queue, m.id, m.claim_token, 'poison');
    return ids || m.id;
end;
$$;

create function pg_temp.revives(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    ids bigint[];
    m pgqueue.message;
    sent_at timestamptz := pgqueue._now();
begin
    perform pgqueue.create_queue(queue, visibility_timeout => '30 s', max_attempts => 1, dedicated => has_table);
    return next is(pgqueue.redrive(queue), 0, queue || ': without dead letters there is nothing to redrive');
    return next is(pgqueue.purge_dead_messages(queue), 0::bigint, queue || ': nor to purge');

    ids := pg_temp.die(queue);
    return next is((select array_agg(d.id) from pgqueue.browse_dead_messages(queue) d), ids, queue || ': what died is a dead letter');
    perform pgqueue.alter_queue(queue, max_attempts => 2);
    return next is(pgqueue.redrive(queue, 2), 2, queue || ': redrive returns how many it sent back');
    return next is((select array_agg(d.id) from pgqueue.browse_dead_messages(queue) d), ids[3:4], queue || ': redrive takes the lowest ids first');
    return next is((select s.ready_messages from pgqueue.stats(queue) s), 2::bigint, queue || ': what is redriven is ready at once');
    select * into m from pgqueue.claim(queue);
    return next is((m.id, m.payload, m.headers, m.enqueued_at)::text, (ids[1], '{"n": 1}'::jsonb, '{"h": 1}'::jsonb, sent_at)::text,
        queue || ': a redriven message keeps its id, its content and the moment it was sent');
    return next is((m.attempt_count, m.max_attempts, m.expires_at)::text, (1, 2, null::timestamptz)::text,
        queue || ': it starts with no attempts, the max_attempts of the queue and no expiry');
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids[2:2], queue || ': each redriven message is delivered once');

    return next is(pgqueue.redrive(queue, ids => ids[4:4] || ids[1:1]), 1, queue || ': redrive of ids passes over those that are not dead');
    select * into m from pgqueue.claim(queue);
    return next is((m.id, m.last_error)::text, (ids[4], 'poison'::text)::text, queue || ': a redriven message keeps its last error');
    return next is((select array_agg(d.id) from pgqueue.browse_dead_messages(queue) d), ids[3:3], queue || ': what was not named stays dead');
    return next is(pgqueue.redrive(queue, ids => '{}'), 0, queue || ': redrive of no ids sends none back');

    perform pgqueue.nack(queue, m.id, m.claim_token, '0', 'again');
    select * into m from pgqueue.claim(queue);
    perform pgqueue.nack(queue, m.id, m.claim_token, '0', 'for good');
    return next is((select (d.attempt_count, d.last_error, d.reason)::text from pgqueue.browse_dead_messages(queue) d where d.id = ids[4]), '(2,"for good",attempts_exhausted)',
        queue || ': a redriven message dies again under its id, for its new reason');

    perform pgqueue.purge_queue(queue);
    return next is(pgqueue.purge_dead_messages(queue, ids[4:4] || ids[1:1]), 1::bigint, queue || ': purge_dead_messages counts those of the ids that were dead');
    return next is((select array_agg(d.id) from pgqueue.browse_dead_messages(queue) d), ids[3:3], queue || ': and leaves the others');
    return next is(pgqueue.purge_dead_messages(queue, '{}'), 0::bigint, queue || ': purge_dead_messages of no ids deletes none');
    return next is(pgqueue.purge_dead_messages(queue), 1::bigint, queue || ': without ids it deletes all');
    return next is(pgqueue.redrive(queue), 0, queue || ': what is purged cannot be redriven');
end;
$$;
select pg_temp.revives('dead_letter_shared', false);
select pg_temp.revives('dead_letter_dedicated', true);

create function pg_temp.leaves_other_queues_alone() returns setof text language plpgsql as $$
declare
    ids bigint[];
begin
    perform pgqueue.create_queue('dead_letter_beside', max_attempts => 1, visibility_timeout => '30 s');
    ids := pg_temp.die('dead_letter_beside');
    return next is(pgqueue.redrive('dead_letter_shared', ids => ids), 0, 'redrive takes nothing from another queue');
    return next is(pgqueue.purge_dead_messages('dead_letter_shared', ids), 0::bigint, 'purge_dead_messages takes nothing from another queue');
end;
$$;
select pg_temp.leaves_other_queues_alone();
select throws_ok($$ select pgqueue.redrive('dead_letter_shared', 0) $$, '22023', null, 'redrive refuses zero messages');
select throws_ok($$ select pgqueue.redrive('dead_letter_shared', null) $$, '22023', null, 'redrive refuses a null number of messages');
select throws_ok($$ select pgqueue.redrive('dead_letter_nowhere') $$, 'PQ001', null, 'redrive refuses an unknown queue');
select throws_ok($$ select pgqueue.purge_dead_messages('dead_letter_nowhere') $$, 'PQ001', null, 'purge_dead_messages refuses an unknown queue');
select is((select count(*) from pgqueue.browse_dead_messages('dead_letter_beside')), 4::bigint, 'what was refused changed nothing');

select * from finish();
rollback;
