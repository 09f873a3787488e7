begin;
-- The lock makes test files wait for each other: this file stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
select plan(51);

select pgqueue.create_queue('results', max_attempts => 2, max_payload_bytes => 100) is not null as made \gset
select pgqueue.enqueue('results', '1') as number, gen_random_uuid() as uuid \gset
select lives_ok(format($$ select pgqueue.create_result('results', %s, %L, '{"name": "f"}') $$, :number, :'uuid'), 'a message gets a result');
create function pg_temp.result(id text) returns text language sql as $$
    select format('%s %s %s %s %s', r.status, coalesce(r.reason, '-'), r.attempt_count, r.errors, coalesce(r.value, '"-"')) from pgqueue.get_result(id::uuid) r
$$;
select is(pg_temp.result(:'uuid'), 'ready - 0 [] "-"', 'a new result is ready');

-- Attempts.
select claim_token as token from pgqueue.claim('results', claimed_by => 'one') \gset
select is((select r.workers from pgqueue.update_result('results', :number, 'running', worker => 'one') r), array['one'], 'an attempt names its worker');
select is(pgqueue.nack('results', :number, :'token', '1 min'), true, 'the attempt fails');
select is((select count(*) from pgqueue.update_result('results', :number, 'ready', error => '"oh"')), 1::bigint, 'a failed attempt leaves its error');
select is(pg_temp.result(:'uuid'), 'ready - 1 ["oh"] "-"', 'a result whose message waits for a retry is ready');
select is((select r.status from pgqueue.update_result('results', :number, 'running', worker => 'late') r), 'ready', 'an attempt that begins after another one has returned the message is none');
select is(pg_temp.result(:'uuid'), 'ready - 1 ["oh"] "-"', 'such an attempt changes nothing');
set local test.now = '2030-01-01 12:01:00+00';
select claim_token as token from pgqueue.claim('results') \gset
select results_eq(format($$ select r.workers, r.started_at, r.last_attempted_at from pgqueue.update_result('results', %s, 'running', worker => 'two') r $$, :number),
    $$ values (array['one', 'two'], timestamptz '2030-01-01 12:00:00+00', timestamptz '2030-01-01 12:01:00+00') $$, 'a further attempt keeps the time of the first one');

-- A message that dies.
set local test.now = '2030-01-01 12:05:00+00';
select pgqueue.sweep_queue('results') as swept \gset
select is(pg_temp.result(:'uuid'), 'failed attempts_exhausted 2 ["oh"] "-"', 'the result of a dead letter has failed, for its reason, although no consumer has said so');
select is((select r.finished_at from pgqueue.get_result(:'uuid') r), '2030-01-01 12:05:00+00', 'the result of a dead letter has ended when the message died');
select is(pgqueue.purge_results('results'), 0::bigint, 'the result of a dead letter stays');
select is(pgqueue.redrive('results'), 1, 'the dead letter is sent again');
select is(pg_temp.result(:'uuid'), 'ready - 2 ["oh"] "-"', 'the result of a dead letter that is sent again is ready');

-- The outcome.
select claim_token as token from pgqueue.claim('results') \gset
select is(pgqueue.ack('results', :number, :'token'), true, 'the message is acknowledged');
select is(pg_temp.result(:'uuid'), 'failed removed 2 ["oh"] "-"', 'a result whose message is gone without an outcome has failed');
select is((select r.expires_at from pgqueue.update_result('results', :number, 'successful', '42') r), '2030-01-15 12:05:00+00', 'a result expires 14 days after its end');
select is(pg_temp.result(:'uuid'), 'successful - 2 ["oh"] 42', 'a successful result has its value');
select is((select r.status from pgqueue.update_result('results', :number, 'running', worker => 'late') r), 'successful', 'an attempt that begins after another one has settled the message gets its outcome');
select is(pg_temp.result(:'uuid'), 'successful - 2 ["oh"] 42', 'such an attempt does not undo the outcome');
select is((select count(*) from pgqueue.update_result('results', :number + 1, 'running')), 0::bigint, 'a message without a result has none after an attempt');

-- Limits.
select throws_ok(format($$ select pgqueue.create_result('results', %s, gen_random_uuid()) $$, :number), '23505', null, 'a message has at most one result');
select throws_ok(format($$ select pgqueue.create_result('results', 1, %L) $$, :'uuid'), '23505', null, 'a message_id has at most one result');
select throws_ok($$ select pgqueue.create_result('results', null, gen_random_uuid()) $$, '22023', 'invalid id: null', 'a result needs an id');
select throws_ok($$ select pgqueue.create_result('results', 1, null) $$, '22023', 'invalid message_id: null', 'a result needs a message_id');
select throws_ok($$ select pgqueue.create_result('results', 1, gen_random_uuid(), to_jsonb(repeat('x', 100))) $$, 'PQ003', null, 'a task is as large as a payload may be');
select throws_ok($$ select pgqueue.create_result('results', 1, gen_random_uuid(), expires_in => '-1 s') $$, '22023', null, 'a result expires after its end');
select throws_ok($$ select pgqueue.update_result('results', null, 'ready') $$, '22023', 'invalid id: null', 'update_result needs an id');
select throws_ok(format($$ select pgqueue.update_result('results', 1, %s) $$, v.arguments), '22023', null, format('update_result refuses %s', v.arguments))
from (values ('null'), ('''done'''), ('''ready'', ''1'''), ('''running'', error => ''1'''), ('''ready'', worker => ''w''')) v (arguments);
select throws_ok($$ select pgqueue.update_result('results', 1, 'successful', to_jsonb(repeat('x', 100))) $$, 'PQ003', null, 'a value is as large as a payload may be');
select is((select count(*) from pgqueue.update_result('results', :number, 'ready', error => to_jsonb(repeat('x', 65000)))), 1::bigint, 'an error may be larger than a payload');
select throws_ok($$ select pgqueue.update_result('results', 1, 'ready', error => to_jsonb(repeat('x', 65535))) $$, 'PQ003', null, 'an error has a limit, too');
select count(u) as updated from generate_series(1, 21) n cross join lateral pgqueue.update_result('results', :number, 'ready', error => to_jsonb(n)) u \gset
select count(u) as updated from generate_series(1, 101) n cross join lateral pgqueue.update_result('results', :number, 'running', worker => n::text) u \gset
select results_eq(format($$ select jsonb_array_length(r.errors), r.errors ->> -1, cardinality(r.workers), r.workers[100], r.attempt_count from pgqueue.get_result(%L) r $$, :'uuid'),
    $$ values (20, '21', 100, '101', 103) $$, 'a result keeps the last 20 errors and the last 100 workers');

-- Removal.
select throws_ok($$ select pgqueue.purge_results('results', '-1 s') $$, '22023', null, 'purge_results refuses a negative age');
create function pg_temp.send(delay interval, finish boolean) returns uuid language plpgsql as $$
declare
    message_id constant uuid := gen_random_uuid();
    number constant bigint := pgqueue.enqueue('results', '1', delay => delay);
begin
    perform pgqueue.create_result('results', number, message_id, expires_in => '1 day');
    if finish then
        perform pgqueue.cancel('results', number), pgqueue.update_result('results', number, 'failed', error => '"oh"');
    end if;
    return message_id;
end;
$$;
select count(*) as sent from pgqueue.update_result('results', :number, 'successful') \gset
select pg_temp.send('30 days', false) as scheduled, pg_temp.send('0', true) as finished \gset
select is(pgqueue.purge_results('results', '1 h'), 0::bigint, 'purge_results leaves results that are younger');
set local test.now = '2030-01-02 12:05:00+00';
delete from pgqueue.compactions \g /dev/null
select setval('pgqueue.next_housekeeping_at', 1), pgqueue._call_if_due('housekeeping', pgqueue._now()) is not null as done \gset
select is((select count(*) from pgqueue.compactions c where c.handler = '_at_housekeeping_results'), 1::bigint, 'a claim has expired results removed at its commit');
select pgqueue._at_housekeeping_results(pgqueue._now()) is not null as done \gset
select is(array(select r.status from unnest(array[:'uuid', :'scheduled', :'finished']::uuid[]) u cross join lateral pgqueue.get_result(u) r), array['successful', 'ready'],
    'claims delete results that have expired, and none of a message that is still there');
select is(pgqueue.purge_results('results'), 1::bigint, 'purge_results deletes results that have ended');
select is(pg_temp.result(:'scheduled'), 'ready - 0 [] "-"', 'purge_results leaves results of messages that are scheduled');
select pgqueue.enqueue('results', '1') as number, gen_random_uuid() as uuid \gset
select pgqueue.create_result('results', :number, :'uuid', expires_in => '0') is not null as made \gset
select claim_token as token from pgqueue.claim('results') \gset
select count(*) as updated from pgqueue.update_result('results', :number, 'failed') where pgqueue.reject('results', :number, :'token') \gset
select is(pgqueue.purge_results('results'), 0::bigint, 'purge_results leaves the result of a dead letter that a consumer has ended');
select pgqueue._at_housekeeping_results(pgqueue._now()) is not null as done \gset
select is(pg_temp.result(:'uuid'), 'failed - 0 [] "-"', 'claims leave it, too, after it has expired');
-- Costs. 10,000 results and dead letters have about 500 pages, and the tables are not analyzed.
select count(*) as sent from pgqueue.create_queue('results-many') \gset
insert into pgqueue.results (queue_name, id, message_id, enqueued_at, expires_at, expires_in)
select 'results-many', -n, gen_random_uuid(), pgqueue._now(), pgqueue._now() + (n - 10) * interval '1 s', '1 day' from generate_series(1, 10000) n;
insert into pgqueue.dead_messages (id, queue_name, enqueued_at, attempt_count, max_attempts, reason)
select -n, 'results-many', pgqueue._now(), 1, 1, 'rejected' from generate_series(2, 10000) n;
create function pg_temp.pages(statement text) returns int language plpgsql as $$
declare
    plan json;
begin
    execute 'explain (analyze, buffers, timing off, format json) ' || statement into plan;
    return (plan -> 0 -> 'Plan' ->> 'Shared Hit Blocks')::int + (plan -> 0 -> 'Plan' ->> 'Shared Read Blocks')::int;
end;
$$;
select cmp_ok(pg_temp.pages('select pgqueue._at_housekeeping_results(pgqueue._now())'),
    '<', 500, 'claims do not read the results that have not expired, nor all dead letters');
select is((select array_agg(n) from generate_series(1, 10) n where not exists (select from pgqueue.results r where r.queue_name = 'results-many' and r.id = -n)), array[1], 'claims delete the expired results of messages that are gone');
set local test.now = '2030-01-02 16:00:00+00';
select pgqueue._at_housekeeping_results(pgqueue._now()) is not null as done \gset
select is((select count(*) from pgqueue.results r where r.queue_name = 'results-many' and r.expires_at <= pgqueue._now()), 8990::bigint,
    'claims look for the messages of 1,000 results at a time, and later for those of others');
set local test.now = '2030-01-02 17:00:00+00';
select cmp_ok(pg_temp.pages('select pgqueue._at_housekeeping_results(pgqueue._now())'), '<', 50000, 'claims read few pages for each of them');
select cmp_ok(pg_temp.pages($$ select pgqueue.purge_results('results-many') $$), '<', 60000, 'purge_results looks for a message first among the dead letters, and in one statement');
select count(*) as dropped from pgqueue.drop_queue('results') \gset
select is((select count(*) from pgqueue.results r where r.queue_name = 'results'), 0::bigint, 'a dropped queue leaves no results');

select * from finish();
rollback;
