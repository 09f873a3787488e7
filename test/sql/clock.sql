begin;
select plan(8);

select ok(pgqueue._now() between clock_timestamp() - interval '1 s' and clock_timestamp() + interval '1 s', 'the clock shows the time of day');
select ok((select b > a from (select pgqueue._now() as a, pg_sleep(0.001), pgqueue._now() as b) s), 'it goes on within a statement');
select ok(pgqueue._now() > now(), 'it goes on within a transaction');
select volatility_is('pgqueue', '_now', '{}'::name[], 'volatile', 'no plan takes it for a constant');

select lives_ok($$ select pgqueue.create_queue('clock', visibility_timeout => '30 s') $$, 'a queue is made');
create function pg_temp.counts_from_now() returns setof text language plpgsql as $$
declare
    m pgqueue.message;
begin
    perform pg_sleep(0.01);
    perform pgqueue.enqueue('clock', '1');
    select * into m from pgqueue.claim('clock');
    return next ok(m.enqueued_at > now(), 'a message is sent at the time of day, not at the start of the transaction');
    return next ok(m.visible_at > now() + interval '30.01 s', 'a claim runs from the time of day, not from the start of the transaction');
end;
$$;
select pg_temp.counts_from_now();
-- Two only ask whether their transaction began with this statement; one writes a view, in which no private function can be called.
select is(
    (select array_agg(p.proname::text order by p.proname) from pg_proc p
    where p.pronamespace = 'pgqueue'::regnamespace and p.proname not in ('_wake', '_is_first_statement', '_relation_query')
        and p.prosrc ~* '\m(((clock|statement|transaction)_timestamp|timeofday|now)\s*\(|current_timestamp|current_date|current_time|localtimestamp|localtime)'),
    array['_now'], 'no other function reads a clock');

select * from finish();
rollback;
