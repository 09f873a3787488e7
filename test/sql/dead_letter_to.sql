begin;
-- The lock makes test files wait for each other: this file attaches tables and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;
-- Makes the first attempt of the next message of a queue fail for good.
create function pg_temp.fail(queue text, error text default 'it broke') returns bigint language sql
as $$ select c.id from pgqueue.claim(queue) c where pgqueue.reject(queue, c.id, c.claim_token, error) $$;
-- A claim returns dead letters that its sweep has taken, or the next claim does.
create function pg_temp.claims(queue text) returns setof pgqueue.message language plpgsql as $$
begin
    return query select * from pgqueue.claim(queue, 10);
    return query select * from pgqueue.claim(queue, 10);
end;
$$;
create function pg_temp.payloads(queue text) returns text language sql
as $$ select string_agg(c.payload #>> '{}', ' ') from pg_temp.claims(queue) c $$;

select plan(53);

-- The setting
select pgqueue.create_queue('errors') is not null, pgqueue.create_queue('orders', max_attempts => 2, backoff_jitter => 0) is not null \g /dev/null
select is((pgqueue.create_queue('mails', dead_letter_to => 'errors')).dead_letter_to, 'errors', 'create_queue returns dead_letter_to');
select is((pgqueue.get_queue('mails')).dead_letter_to, 'errors', 'get_queue returns dead_letter_to');
select is((pgqueue.get_queue('orders')).dead_letter_to, null, 'a queue has no dead_letter_to by default');
select is((pgqueue.alter_queue('orders', dead_letter_to => 'errors')).dead_letter_to, 'errors', 'alter_queue sets dead_letter_to');
select is((pgqueue.alter_queue('orders', visibility_timeout => '30 s')).dead_letter_to, 'errors', 'alter_queue without the argument leaves it');
select is((pgqueue.alter_queue('orders', dead_letter_to => 'orders')).dead_letter_to, null, 'the name of the queue itself ends it');
select throws_ok($$ select pgqueue.create_queue('x', dead_letter_to => 'nowhere') $$, 'PQ001', 'queue ''nowhere'' does not exist', 'create_queue refuses the name of a queue that does not exist');
select throws_ok($$ select pgqueue.alter_queue('orders', dead_letter_to => 'nowhere') $$, 'PQ001', 'queue ''nowhere'' does not exist', 'alter_queue refuses it, too');
select throws_ok($$ select pgqueue.create_queue('x', dead_letter_to => 'x') $$, '22023', 'invalid dead_letter_to: ''x''', 'create_queue refuses the queue itself');
select throws_ok($$ select pgqueue.create_queue('x', dead_letter_to => 'errors', dlq_enabled => false) $$, '22023', 'invalid dead_letter_to: ''errors''', 'a queue without dead letters cannot send them');
select throws_ok($$ select pgqueue.alter_queue('mails', dlq_enabled => false) $$, '22023', 'invalid dead_letter_to: ''errors''', 'a queue that sends its dead letters must keep them');
select throws_ok($$ select pgqueue.create_queue('x', group_limit => 1, on_dead => 'hold', dead_letter_to => 'errors') $$, '22023', 'invalid on_dead: ''hold''', 'a group cannot wait for a dead letter that leaves the queue');
select throws_ok($$ select pgqueue.alter_queue('errors', dead_letter_to => 'mails') $$, '22023', 'invalid dead_letter_to: ''mails''', 'a cycle of two queues is refused');
select pgqueue.create_queue('last') is not null, pgqueue.alter_queue('errors', dead_letter_to => 'last') is not null \g /dev/null
select throws_ok($$ select pgqueue.alter_queue('last', dead_letter_to => 'mails') $$, '22023', 'invalid dead_letter_to: ''mails''', 'a cycle of three queues is refused');

-- Admin access to both queues
create role pgqueue_test_half;
select pgqueue.grant_access('pgqueue_test_half', 'admin', 'half-*') \g /dev/null
set local role pgqueue_test_half;
select throws_ok($$ select pgqueue.create_queue('half-a', dead_letter_to => 'errors') $$, 'PQ001', 'queue ''errors'' does not exist', 'create_queue needs admin access to the other queue');
select lives_ok($$ select pgqueue.create_queue('half-a'), pgqueue.create_queue('half-b') $$, 'the role creates queues of its own');
select throws_ok($$ select pgqueue.alter_queue('half-a', dead_letter_to => 'errors') $$, 'PQ001', 'queue ''errors'' does not exist', 'alter_queue needs admin access to the other queue');
select is((pgqueue.alter_queue('half-a', dead_letter_to => 'half-b')).dead_letter_to, 'half-b', 'access to both queues suffices');
select is((pgqueue.alter_queue('half-a', dead_letter_to => 'half-a')).dead_letter_to, null, 'the role can end it');
select throws_ok($$ select pgqueue.redrive('half-a', to_queue => 'errors') $$, 'PQ001', 'queue ''errors'' does not exist', 'redrive needs admin access to the other queue');
reset role;

-- Dead letters that exist already
select pgqueue.enqueue('orders', '"early"', headers => '{"h": 1}', message_id => '00000000-0000-0000-0000-000000000001') as early \gset
select pg_temp.fail('orders') \g /dev/null
select is(pg_temp.payloads('errors'), null, 'without dead_letter_to dead letters stay');
select pgqueue.alter_queue('errors', dead_letter_to => 'errors'), pgqueue.alter_queue('orders', dead_letter_to => 'errors') \g /dev/null
select pg_temp.pass('2 s') \g /dev/null
select is(pgqueue.next_due_at('errors'), pgqueue._now(), 'next_due_at of the other queue is the present while there are dead letters to take');
select results_eq(
    $$ select c.payload, c.attempt_count, c.max_attempts, c.message_id, c.last_error, c.expires_at, c.headers from pg_temp.claims('errors') c $$,
    format($$ values ('"early"'::jsonb, 1, 5, '00000000-0000-0000-0000-000000000001'::uuid, 'it broke', null::timestamptz, '{"h": 1, "pgqueue.dead_letter": {"id": %s, "queue": "orders", "reason": "rejected", "attempts": 1, "died_at": "2030-01-01T12:00:00+00:00"}}'::jsonb) $$, :early),
    'a claim of the other queue returns the dead letter as a new message, with the header pgqueue.dead_letter');
select is((select count(*) from pgqueue.browse_dead_messages('orders')), 0::bigint, 'the dead letter has left its queue');
select is((select s.enqueued_total from pgqueue.stats('errors') s), 1::bigint, 'the other queue counts it as sent');
select is((select s.dead_total from pgqueue.stats('orders') s), 1::bigint, 'its queue has counted it as dead');

-- Later dead letters of several queues
select pgqueue.enqueue('orders', '"spent"') \g /dev/null
select pgqueue.claim('orders', 1, '1 s') \g /dev/null
select pg_temp.pass('2 s'), pgqueue.claim('orders', 1, '1 s') \g /dev/null
select pg_temp.pass('2 s'), pgqueue.enqueue('orders', '"rejected"'), pgqueue.enqueue('mails', '"mail"') \g /dev/null
select pg_temp.fail('orders', 'no use'), pg_temp.fail('mails'), pg_temp.pass('2 s') \g /dev/null
select is((select count(*) from pgqueue.messages m where m.queue_name = 'errors' and m.attempt_count = 0), 0::bigint, 'claims and failures send nothing to the other queue');
select is((select array_agg(s.dead_messages order by s.queue_name) from pgqueue.stats() s where s.queue_name in ('mails', 'orders')), '{1,2}', 'their queues have the dead letters');
select results_eq(
    $$ select c.payload #>> '{}', c.headers #>> '{pgqueue.dead_letter,queue}', c.headers #>> '{pgqueue.dead_letter,reason}', c.headers #>> '{pgqueue.dead_letter,attempts}' from pg_temp.claims('errors') c order by 1 $$,
    $$ values ('mail', 'mails', 'rejected', '1'), ('rejected', 'orders', 'rejected', '1'), ('spent', 'orders', 'attempts_exhausted', '2') $$,
    'a claim of the other queue takes the dead letters of all queues that name it');
select is(pgqueue.next_due_at('errors') > pgqueue._now(), true, 'next_due_at then tells when the first claim ends');
select pgqueue.enqueue('orders', '"received"') \g /dev/null
select pg_temp.fail('orders'), pg_temp.pass('2 s') \g /dev/null
select is((select r.payload from generate_series(1, 2) n, pgqueue.receive('errors', n * 10) r), '"received"', 'a receive takes dead letters, too');

-- Headers that do not fit
insert into pgqueue.messages (queue_name, payload, headers) values
    ('orders', '"array"', '["raw"]'), ('orders', '"full"', jsonb_build_object('h', repeat('x', 65500)));
update pgqueue.messages set visible_at = pgqueue._now(), enqueued_at = pgqueue._now() where queue_name = 'orders' and attempt_count = 0;
select pg_temp.fail('orders'), pg_temp.fail('orders'), pg_temp.pass('2 s') \g /dev/null
select is((select string_agg(c.payload::text || ' ' || octet_length(c.headers::text), ', ' order by c.payload::text) from pg_temp.claims('errors') c), '"array" 7, "full" 65509',
    'a dead letter whose headers have no room for the header is sent with its own');

-- Other kinds of queues
select pgqueue.create_queue('grouped', group_limit => 1) is not null, pgqueue.create_queue('ranked', priorities => true) is not null \g /dev/null
select pgqueue.create_queue('groups', dead_letter_to => 'grouped') is not null, pgqueue.create_queue('ranks', dead_letter_to => 'ranked') is not null \g /dev/null
select pgqueue.enqueue('groups', '"g1"', group_key => 'g'), pgqueue.enqueue('groups', '"g2"', group_key => 'g'), pgqueue.enqueue('ranks', '"low"', priority => 1), pgqueue.enqueue('ranks', '"high"', priority => 9) \g /dev/null
select pg_temp.fail(q) from unnest('{groups,groups,ranks,ranks}'::text[]) as q \g /dev/null
select pg_temp.pass('2 s') \g /dev/null
select is(pg_temp.payloads('grouped'), 'g1', 'a queue with groups takes dead letters, and keeps their groups in order');
select setseed(0.5) \g /dev/null
select is(pg_temp.payloads('ranked'), 'high low', 'a queue with priorities takes dead letters, and claims them by priority');

-- A chain
select pgqueue.create_queue('end') is not null, pgqueue.create_queue('middle', dead_letter_to => 'end') is not null, pgqueue.create_queue('start', dead_letter_to => 'middle') is not null \g /dev/null
select pgqueue.enqueue('start', '"far"') \g /dev/null
select pg_temp.fail('start'), pg_temp.pass('2 s') \g /dev/null
select is((select pgqueue.reject('middle', c.id, c.claim_token) from pg_temp.claims('middle') c), true, 'a dead letter becomes a message of the next queue');
select pg_temp.pass('2 s') \g /dev/null
select is((select c.headers #>> '{pgqueue.dead_letter,queue}' from pg_temp.claims('end') c), 'middle', 'there it can become a dead letter again, with a header of its own');

-- The other queue is paused, or dropped
select pgqueue.pause_queue('middle'), pgqueue.enqueue('start', '"kept"'), pgqueue.enqueue('start', '"more"') \g /dev/null
select pg_temp.fail('start'), pg_temp.fail('start'), pg_temp.pass('2 s'), pgqueue.claim('middle') \g /dev/null
select is((select s.dead_messages from pgqueue.stats('start') s), 2::bigint, 'a paused queue takes no dead letters');
select lives_ok($$ select pgqueue.drop_queue('middle') $$, 'the other queue is dropped');
select is((pgqueue.get_queue('start')).dead_letter_to, null, 'this ends dead_letter_to');
select is((select string_agg(d.payload #>> '{}', ' ') from pgqueue.browse_dead_messages('start') d), 'kept more', 'the dead letters stay in their queue');
select pgqueue.create_queue('middle') is not null, pg_temp.pass('2 s') \g /dev/null
select is(pg_temp.payloads('middle'), null, 'a new queue of the name takes none');

-- redrive to another queue
select is(pgqueue.redrive('start', 1, to_queue => 'end'), 1, 'redrive sends a dead letter to another queue');
select results_eq(
    $$ select c.payload, c.headers #>> '{pgqueue.dead_letter,queue}' from pg_temp.claims('end') c $$, $$ values ('"kept"'::jsonb, 'start') $$,
    'the other queue has it as a message, with the header');
select is((select string_agg(d.payload #>> '{}', ' ') from pgqueue.browse_dead_messages('start') d), 'more', 'the others stay');
select throws_ok($$ select pgqueue.redrive('start', to_queue => 'nowhere') $$, 'PQ001', 'queue ''nowhere'' does not exist', 'redrive refuses the name of a queue that does not exist');
select is((select pgqueue.redrive('start', ids => array[d.id, d.id, 0], to_queue => 'end') from pgqueue.browse_dead_messages('start') d), 1, 'redrive to another queue counts each dead letter once');
select is(pg_temp.payloads('end'), 'more', 'redrive with ids sends those dead letters');
select pgqueue.enqueue('start', '"home"'), pg_temp.fail('start') \g /dev/null
select pg_temp.fail('start') \g /dev/null
select is(pgqueue.redrive('start', to_queue => 'start'), 1, 'redrive to the queue itself returns the dead letter');
select is(pg_temp.payloads('start'), 'home', 'it is ready again');

-- Many dead letters are taken in slices, at most eight in a claim
select pgqueue.create_queue('many', dead_letter_to => 'end') is not null \g /dev/null
select count(*) from pgqueue.enqueue_batch('many', bodies => array_fill((select string_agg(sha256(n::text::bytea), '') from generate_series(1, 1920) n), array[40])) \g /dev/null
select pgqueue.reject('many', c.id, c.claim_token) from pgqueue.claim('many', 40) c \g /dev/null
select pg_temp.pass('2 s'), pgqueue.claim('end') \g /dev/null
select is((select s.dead_messages from pgqueue.stats('many') s), 16::bigint, 'a claim takes at most eight slices of large dead letters');
select pg_temp.pass('2 s'), pgqueue.claim('end') from generate_series(1, 5) \g /dev/null
select is((select s.dead_messages from pgqueue.stats('many') s), 0::bigint, 'later claims take the rest');

-- The relation of a transport: what reads it claims nothing
select pgqueue.create_queue('endpoint'), pgqueue.expose_transport('endpoint'), pgqueue.alter_queue('start', dead_letter_to => 'endpoint'), pgqueue.enqueue('start', '"failed"') \g /dev/null
select pg_temp.fail('start'), setval('pgqueue.next_housekeeping_at', 1) \g /dev/null
select pgqueue.advance_transport('endpoint') \g /dev/null
select results_eq(
    $$ select m.payload, m.transport_seq from pgqueue.messages m where m.queue_name = 'endpoint' $$, $$ values ('"failed"'::jsonb, 1::bigint) $$,
    'advance_transport takes the dead letters for the relation');
select cmp_ok(pg_sequence_last_value('pgqueue.next_housekeeping_at'), '>', 1::bigint, 'it does the housekeeping, too');

select * from finish();
rollback;
