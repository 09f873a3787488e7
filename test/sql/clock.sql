begin;
-- The lock makes test files wait for each other: others compact the tables that this file writes to.
lock table pgqueue.messages in access exclusive mode;
select plan(10);

select ok(pgqueue._now() between clock_timestamp() - interval '1 s' and clock_timestamp() + interval '1 s', '_now returns the current time of day');
select ok((select b > a from (select pgqueue._now() as a, pg_sleep(0.001), pgqueue._now() as b) s), '_now advances within a statement');
select ok(pgqueue._now() > now(), '_now advances within a transaction');
select volatility_is('pgqueue', '_now', '{}'::name[], 'volatile', '_now is volatile, so the planner never treats it as a constant');

select lives_ok($$ select pgqueue.create_queue('clock', visibility_timeout => '30 s') $$, 'a queue is created');
create function pg_temp.counts_from_now() returns setof text language plpgsql as $$
declare
    m pgqueue.message;
begin
    perform pg_sleep(0.01);
    perform pgqueue.enqueue('clock', '1');
    select * into m from pgqueue.claim('clock');
    return next ok(m.enqueued_at > now(), 'enqueued_at is the time of the call, not of the start of the transaction');
    return next ok(m.visible_at > now() + interval '30.01 s', 'the visibility timeout counts from the call, not from the start of the transaction');
    perform pgqueue.enqueue('clock', '2', delay => '10 s', expires_in => '20 s');
    return next ok((select b.visible_at > now() + interval '10.01 s' and b.expires_at > now() + interval '20.01 s' from pgqueue.browse('clock', 'scheduled') b),
        'a delay and an expiry count from the call, not from the start of the transaction');
end;
$$;
select pg_temp.counts_from_now();
-- _on_queue_changed_idle only asks whether the transaction began with this statement.
-- _has_time asks how long the statement of the client has been running.
-- _expose and _clock_findings write the text of a view and of repairs, which call no private function.
select is(
    (select array_agg(p.proname::text order by p.proname) from pg_proc p
    where p.pronamespace = 'pgqueue'::regnamespace and p.proname not in ('_on_queue_changed_idle', '_has_time', '_expose', '_clock_findings')
        and p.prosrc ~* '\m(((clock|statement|transaction)_timestamp|timeofday|now)\s*\(|current_timestamp|current_date|current_time|localtimestamp|localtime)'),
    array['_now'], 'no other function reads a clock');

-- An hour before clocks change in Berlin.
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select timestamptz '2030-03-31 00:00+00' $$;
do $$ begin
    perform set_config('timezone', zone, true), pgqueue.enqueue('clock', '"zone"', expires_in => '300 days'),
        pgqueue.enqueue('clock', '"zone"', delay => '1 day', expires_in => '300 days')
    from unnest(array['UTC', 'Europe/Berlin', 'America/New_York', 'Australia/Lord_Howe', 'Asia/Kathmandu', 'Pacific/Apia']) as zone;
end $$;
select results_eq(
    $$ select extract(epoch from b.visible_at - pgqueue._now()) / 86400, extract(epoch from b.expires_at - pgqueue._now()) / 86400, count(*)
        from unnest(array['ready', 'scheduled']) as state, pgqueue.browse('clock', state) b where b.payload = '"zone"' group by 1, 2 order by 1 $$,
    $$ values (0::numeric, 300::numeric, 6::bigint), (1, 300, 6) $$, 'a day of a delay or of an expiry has 24 hours in every time zone');

select * from finish();
rollback;
