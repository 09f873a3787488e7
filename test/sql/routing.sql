begin;
-- The lock makes test files wait for each other: this file attaches tables.
lock table pgqueue.messages in access exclusive mode;
select plan(45);

-- The statements of the transport.
set local check_function_bodies = off;
create function pg_temp.enrol(address text, endpoint text, topic text) returns void language sql as $$
    insert into public."SubscriptionRouting" (QueueAddress, Endpoint, Topic) values (address, endpoint, topic)
    on conflict (Endpoint, Topic) do update set QueueAddress = excluded.QueueAddress $$;
create function pg_temp.addresses(topics text[]) returns text[] language sql as $$
    select array_agg(distinct QueueAddress order by QueueAddress) from public."SubscriptionRouting" where Topic = any (topics) $$;
select is(pgqueue.expose_subscriptions(), '"public"."SubscriptionRouting"', 'expose_subscriptions returns the address of the relation');
select pgqueue.create_queue('routing-pub') is not null, pgqueue.create_queue('routing-sub') is not null \g /dev/null
select pgqueue.expose_transport('routing-sub', table_name => 'Sub.Scriber') as address \gset
select lives_ok($$ select pg_temp.enrol('"public"."Sub.Scriber"', 'Sub.Scriber', 'Ns.Event') $$, 'a transport subscribes by the address of its table');
select lives_ok($$ select pg_temp.enrol('"public"."Sub.Scriber"', 'Sub.Scriber', 'Ns.Event') $$, 'a transport can subscribe twice');
select is(pgqueue.publish('Ns.Event', '1'), 1, 'publish sends one copy to a queue that subscribed twice');
select is((select count(*) from public."Sub.Scriber"), 1::bigint, 'the relation of the subscriber shows the published copy');
select is(pgqueue.subscribe('Ns.Event', 'routing-pub'), true, 'a queue without a relation can subscribe');
select is(pg_temp.addresses('{Ns.Event,System.Object}'), '{"\"public\".\"Sub.Scriber\""}', 'a transport finds the addresses of all subscribers of a topic that have a relation');
select is(pgqueue.publish('Ns.Event', '1'), 2, 'publish also sends a copy to a subscriber without a relation');
select lives_ok($$ select pg_temp.enrol('routing-pub', 'Sub.Scriber', 'Ns.Event') $$, 'an endpoint can move its subscription to another address');
select is(pgqueue.publish('Ns.Event', '1'), 1, 'publish sends one copy to a queue with two subscribed endpoints');
select is((select array_agg(l.topic || ' ' || l.queue_name) from pgqueue.list_subscriptions('routing-pub') l), '{"Ns.Event routing-pub"}', 'list_subscriptions returns one row for a queue with two subscribed endpoints');
select is(pg_temp.addresses('{Ns.Event}'), null, 'a transport finds no address while no subscriber has a relation');
select lives_ok($$ select pg_temp.enrol('"public"."Sub.Scriber"', 'Sub.Scriber', 'Ns.Event') $$, 'an endpoint can move a subscription that the relation does not show');
prepare unsubscribing as delete from public."SubscriptionRouting" where Endpoint = 'Sub.Scriber' and Topic = 'Ns.Event' returning QueueAddress;
select results_eq('unsubscribing', $$ values ('"public"."Sub.Scriber"'::text) $$, 'a transport can unsubscribe');
select lives_ok($$ select pg_temp.enrol('"public"."Sub.Scriber"', 'routing-pub', 'Ns.Named') $$, 'an endpoint with another address can have the name of a queue');
select is(pgqueue.subscribe('Ns.Named', 'routing-pub'), true, 'a queue can subscribe although an endpoint has its name');
select lives_ok($$ select pg_temp.enrol('"public"."Sub.Scriber"', 'routing-pub', 'Ns.Event') $$, 'an endpoint with the name of a queue can subscribe to a topic of that queue');
select is((select array_agg(l.topic || ' ' || l.queue_name) from pgqueue.list_subscriptions('routing-pub') l), '{"Ns.Event routing-pub","Ns.Named routing-pub"}', 'list_subscriptions returns the subscriptions of the queue beside those of the endpoint');
select count(pgqueue.unsubscribe('Ns.Named', n)) as ended from unnest(array['routing-pub', 'routing-sub']) n \gset
select pgqueue.unsubscribe('Ns.Event', 'routing-sub') as ended \gset
select is((select array_agg(l.queue_name) from pgqueue.list_subscriptions() l where l.topic = 'Ns.Event'), '{routing-pub}', 'the subscription of the queue stays after the endpoint unsubscribed');
select lives_ok($$ select pgqueue.expose_transport('routing-pub') $$, 'a subscribed queue can be exposed');
select is(pg_temp.addresses('{Ns.Event}'), '{"\"public\".\"routing-pub\""}', 'the address of an exposed subscriber is its relation');
select is_empty($$ select from pgqueue.doctor() f where f.queue_name in ('routing-pub', 'routing-sub') $$, 'doctor reports no subscribed queue that has a relation');
select is(pgqueue.subscribe('Ns.Other', 'routing-pub'), true, 'an exposed queue can subscribe to another topic');
select is(pg_temp.addresses('{Ns.Other}'), '{"\"public\".\"routing-pub\""}', 'the address of a queue that subscribed after it was exposed is its relation');
alter view public."routing-pub" rename to moved;
select is(pg_temp.addresses('{Ns.Event}'), null, 'a transport does not find the old address of a relation that was renamed by hand');
select is((select f.finding from pgqueue.doctor() f where f.queue_name = 'routing-pub'), 'renamed_relation', 'doctor reports a subscriber whose relation was renamed');
select f.repair from pgqueue.doctor() f where f.queue_name = 'routing-pub' \gexec
select is(pg_temp.addresses('{Ns.Event}'), '{"\"public\".\"moved\""}', 'the repair of doctor gives the subscriptions the new address');
drop view public.moved;
select is(pg_temp.addresses('{Ns.Event}'), null, 'a transport does not find the address of a relation that was dropped by hand');
select is((select f.finding from pgqueue.doctor() f where f.queue_name = 'routing-pub'), 'missing_relation', 'doctor reports a relation that was dropped by hand');
select unnest(string_to_array(f.repair, '; ')) from pgqueue.doctor() f where f.queue_name = 'routing-pub' \gexec
select is(pg_temp.addresses('{Ns.Event}'), '{"\"public\".\"routing-pub\""}', 'the repair of doctor creates the relation again');
select is(pgqueue.unexpose_transport('routing-pub'), true, 'a subscribed queue can be unexposed');
select is(pg_temp.addresses('{Ns.Event}'), null, 'a transport does not find the address of an unexposed subscriber');
select is((select array_agg(s.queue_address) from pgqueue.subscriptions s where s.topic = 'Ns.Event'), '{routing-pub}', 'the address of an unexposed subscriber is the name of the queue');
select results_eq($$ select f.severity, f.finding, f.repair from pgqueue.doctor() f where f.queue_name = 'routing-pub' $$, $$ values ('info', 'subscriber_without_relation', 'select pgqueue.expose_transport(''routing-pub'');') $$, 'doctor reports a subscribed queue without a relation');
select pgqueue.subscribe('Ns.*', 'routing-sub') as subscribed \gset
select is(pg_temp.addresses('{Ns.Unknown}'), null, 'a transport does not find a queue that subscribed to a pattern');
select pgqueue.unsubscribe('Ns.*', 'routing-sub') as ended \gset
select throws_ok(format('select pg_temp.enrol(%L, %L, %L)', a, e, t), '23502', null, format('a subscription of the endpoint %s to the topic %s at the address %s is refused', e, t, a)) from (values (null, 'e', 'Ns.Event'), ('routing-pub', null, 'Ns.Event'), ('routing-pub', 'e', null)) v (a, e, t);
select throws_ok($$ select pg_temp.enrol('"public"."nowhere"', 'e', 'Ns.Event') $$, 'PQ001', null, 'a subscription with an unknown address is refused');
select throws_ok($$ select pg_temp.enrol('routing-pub', 'e', 'a..b') $$, '22023', null, 'a subscription to an invalid topic is refused');
select throws_ok($$ select pgqueue.expose_subscriptions() $$, '42P07', null, 'expose_subscriptions refuses the name of an existing relation');
select is(pgqueue.unexpose_subscriptions('public', 'Sub.Scriber'), false, 'unexpose_subscriptions returns false for another relation');
select is(pgqueue.unexpose_subscriptions(), true, 'unexpose_subscriptions returns true for its relation');
select is(pgqueue.unexpose_subscriptions(), false, 'unexpose_subscriptions returns false if there is no such relation');
select is_empty($$ select from pgqueue.doctor() f where f.finding = 'subscriber_without_relation' $$, 'doctor reports no subscribed queue if no relation shows subscriptions');

select * from finish();
rollback;
