begin;
-- The lock makes test files wait for each other: this file attaches a table, grants rights and shifts the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select now() + current_setting('test.ahead')::interval $$;

-- now() stands still in a transaction: plain SQL does not see what enqueue sends in it. So enqueue with an earlier
-- clock.
set local test.ahead = '-1 min';
select plan(210);

select is(pgqueue.expose_contract('mdb_queue'), true, 'expose_contract creates the views');

-- The statements of the contract on the tables themselves.
prepare raw_enqueue as
INSERT INTO pgqueue.messages (queue_name, payload, max_attempts, visible_at)
SELECT q.name, $2, q.max_attempts, now() + ($3 * interval '1 second')
FROM pgqueue.queues q WHERE q.name = $1
RETURNING id;

prepare raw_claim as
UPDATE pgqueue.messages m
SET visible_at = now() + (60 * interval '1 second'),
attempt_count = m.attempt_count + 1,
claimed_by = 'worker-1'
WHERE m.id IN (
SELECT id FROM pgqueue.messages
WHERE queue_name = 'order-events'
AND visible_at <= now()
AND attempt_count < max_attempts
ORDER BY id
FOR UPDATE SKIP LOCKED
LIMIT 10
)
RETURNING m.id, m.payload, m.attempt_count, m.enqueued_at;

prepare raw_ack as
DELETE FROM pgqueue.messages WHERE id = $1 AND claimed_by = $2;

prepare raw_nack as
UPDATE pgqueue.messages
SET visible_at = now() + ($3 * interval '1 second'),
last_error = $4
WHERE id = $1 AND claimed_by = $2;

prepare raw_extend as
UPDATE pgqueue.messages
SET visible_at = now() + ($3 * interval '1 second')
WHERE id = $1 AND claimed_by = $2;

-- The same statements on the views, as the contract prints them.
prepare verbatim_enqueue as
INSERT INTO mdb_queue.messages (queue_name, payload, max_attempts, visible_at)
SELECT q.name, $2, q.max_attempts, now() + ($3 * interval '1 second')
FROM mdb_queue.queues q WHERE q.name = $1
RETURNING id;

prepare verbatim_claim as
UPDATE mdb_queue.messages m
SET visible_at = now() + (60 * interval '1 second'),
attempt_count = m.attempt_count + 1,
claimed_by = 'worker-1'
WHERE m.id IN (
SELECT id FROM mdb_queue.messages
WHERE queue_name = 'order-events'
AND visible_at <= now()
AND attempt_count < max_attempts
ORDER BY id
FOR UPDATE SKIP LOCKED
LIMIT 10
)
RETURNING m.id, m.payload, m.attempt_count, m.enqueued_at;

prepare verbatim_ack as
DELETE FROM mdb_queue.messages WHERE id = $1 AND claimed_by = $2;

prepare verbatim_nack as
UPDATE mdb_queue.messages
SET visible_at = now() + ($3 * interval '1 second'),
last_error = $4
WHERE id = $1 AND claimed_by = $2;

prepare verbatim_extend as
UPDATE mdb_queue.messages
SET visible_at = now() + ($3 * interval '1 second')
WHERE id = $1 AND claimed_by = $2;

create function pg_temp.send(payload text, delay int default 0) returns bigint language plpgsql as $$
declare
    id bigint;
begin
    execute format('execute %s_enqueue(%L, %L, %s)', current_setting('test.form'), 'order-events', payload, delay) into id;
    return id;
end;
$$;
create function pg_temp.take() returns bigint[] language plpgsql as $$
declare
    m record;
    ids bigint[] := '{}';
begin
    for m in execute format('execute %s_claim', current_setting('test.form')) loop
        ids := ids || m.id;
    end loop;
    return (select coalesce(array_agg(i order by i), '{}') from unnest(ids) i);
end;
$$;
create function pg_temp.settle(statement text, id bigint, variadic arguments text[]) returns void language plpgsql as $$
begin
    execute format('execute %s_%s(%s, %s)', current_setting('test.form'), statement, id, (select string_agg(quote_nullable(a), ', ') from unnest(arguments) a));
end;
$$;
create function pg_temp.shift(ahead interval) returns void language sql as $$ select set_config('test.ahead', ahead::text, true) $$;
-- Every scene creates its queue anew, because the clock must not go back on a queue.
create function pg_temp.begin_with(ahead interval, has_table boolean) returns void language plpgsql as $$
begin
    perform pg_temp.shift(ahead);
    if exists (select from pgqueue.list_queues() q where q.name = 'order-events') then
        perform pgqueue.drop_queue('order-events');
    end if;
    perform pgqueue.create_queue('order-events', visibility_timeout => '30 s', max_attempts => 5, dedicated => has_table);
end;
$$;
create function pg_temp.row_of(wanted bigint) returns pgqueue.messages language plpgsql as $$
declare
    m pgqueue.messages;
begin
    select c.* into m from pgqueue.messages c where c.id = wanted;
    return m;
end;
$$;

create function pg_temp.mixes(kind text, has_table boolean, form text) returns setof text language plpgsql as $$
declare
    queue constant text := 'order-events';
    new_id bigint;
    ids bigint[];
    m pgqueue.message;
    n pgqueue.message;
begin
    perform set_config('test.form', form, true);
    perform pg_temp.begin_with('-1 min', has_table);

    new_id := pg_temp.send('{"order_id": 1001}');
    return next ok(new_id is not null, kind || ': a plain insert sends a message and returns its id');
    return next is((pg_temp.row_of(new_id)).max_attempts, 5, kind || ': a plain insert copies max_attempts from the queue');
    execute format('execute %s_enqueue(%L, %L, 0)', form, 'nowhere', '{}') into m.id;
    return next is(m.id, null, kind || ': a plain insert sends nothing if the queue does not exist');
    perform pg_temp.shift('0 s');
    select * into m from pgqueue.claim(queue, claimed_by => 'worker-2');
    return next is((m.id, m.payload, m.attempt_count)::text, (new_id, '{"order_id": 1001}'::jsonb, 1)::text, kind || ': claim returns a message that a plain insert sent');
    return next is(pgqueue.ack(queue, new_id, m.claim_token), true, kind || ': ack deletes a message that a plain insert sent');

    perform pg_temp.begin_with('-1 min', has_table);
    ids := array[pgqueue.enqueue(queue, '{"order_id": 1002}'), pg_temp.send('{"order_id": 1003}')];
    return next is(pg_temp.take(), ids, kind || ': a plain update claims messages that enqueue and a plain insert sent');
    return next is(((pg_temp.row_of(ids[1])).attempt_count, (pg_temp.row_of(ids[1])).claimed_by)::text, '(1,worker-1)', kind || ': a plain claim increments attempt_count and sets claimed_by');
    return next is(pg_temp.take(), '{}'::bigint[], kind || ': a plain claim does not return a claimed message');
    perform pg_temp.shift('0 s');
    return next is((select count(*) from pgqueue.claim(queue, 10)), 0::bigint, kind || ': claim does not return a message that a plain update claimed');
    return next is(pgqueue.ack(queue, ids[1], gen_random_uuid()), false, kind || ': ack with a random token does not acknowledge a plain claim');
    return next throws_ok(format('select pgqueue.ack(%L, %s, null)', queue, ids[1]), '22023', null, kind || ': ack with a null token does not acknowledge a plain claim');
    perform pg_temp.settle('ack', ids[1], 'worker-2');
    return next is((pg_temp.row_of(ids[1])).id, ids[1], kind || ': a plain delete does not acknowledge a claim of another worker');
    perform pg_temp.settle('ack', ids[1], 'worker-1');
    return next is((pg_temp.row_of(ids[1])).id, null, kind || ': a plain delete acknowledges a claim of the same worker');
    perform pg_temp.settle('extend', ids[2], 'worker-1', '600');
    perform pg_temp.shift('9 min');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, kind || ': claim does not return a message that a plain update extended');
    perform pg_temp.shift('11 min');
    select * into m from pgqueue.claim(queue);
    return next is((m.id, m.attempt_count)::text, (ids[2], 2)::text, kind || ': claim returns the message when the plain extension has expired');
    perform pgqueue.ack(queue, m.id, m.claim_token);

    -- Claimed by claim, settled by plain SQL with the name of the claimer.
    perform pg_temp.begin_with('-1 min', has_table);
    new_id := pgqueue.enqueue(queue, '{"order_id": 1004}');
    select * into m from pgqueue.claim(queue, claimed_by => 'worker-3');
    perform pg_temp.settle('extend', new_id, 'worker-3', '600');
    return next is((pg_temp.row_of(new_id)).visible_at, now() + interval '600 s', kind || ': a plain update extends a claim made by claim');
    perform pg_temp.settle('nack', new_id, 'worker-3', '0', 'it broke');
    perform pg_temp.shift('2 s');
    select * into n from pgqueue.claim(queue, claimed_by => 'worker-4');
    return next is((n.id, n.attempt_count, n.last_error)::text, (new_id, 2, 'it broke'::text)::text, kind || ': claim returns a message that a plain update gave back, with its last_error');
    return next is(pgqueue.ack(queue, new_id, m.claim_token), false, kind || ': ack with the token from before a plain nack returns false');
    perform pg_temp.settle('nack', new_id, 'worker-3', '0', 'too late');
    return next is((pg_temp.row_of(new_id)).last_error, 'it broke', kind || ': a plain nack with the claimed_by of an earlier claim changes nothing');
    perform pg_temp.settle('ack', new_id, 'worker-4');
    return next is((pg_temp.row_of(new_id)).id, null, kind || ': a plain delete acknowledges a claim made by claim');
    return next is(pgqueue.ack(queue, new_id, n.claim_token), false, kind || ': ack after a plain delete returns false');

    -- A plain claim of a message whose earlier claim has expired makes the earlier token invalid.
    perform pg_temp.begin_with('-2 min', has_table);
    new_id := pgqueue.enqueue(queue, '{"order_id": 1005}');
    select * into m from pgqueue.claim(queue, claimed_by => 'worker-5');
    return next is(pg_temp.take(), array[new_id], kind || ': a plain update claims a message whose claim has expired');
    perform pg_temp.shift('0 s');
    return next is(pgqueue.ack(queue, new_id, m.claim_token), false, kind || ': ack with the expired claim''s token returns false after a plain claim');
    return next is(pgqueue.nack(queue, new_id, m.claim_token, '0'), false, kind || ': nack with the expired claim''s token returns false after a plain claim');
    return next is(pgqueue.extend(queue, new_id, m.claim_token), false, kind || ': extend with the expired claim''s token returns false after a plain claim');
    return next is((select e.lost from pgqueue.exchange(queue, array[new_id], m.claim_token) e), true, kind || ': exchange with the expired claim''s token reports the message as lost after a plain claim');
    perform pg_temp.settle('nack', new_id, 'worker-1', '20', 'not now');
    perform pg_temp.shift('10 s');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, kind || ': claim does not return a message during the delay of a plain nack');
    perform pg_temp.shift('21 s');
    select * into m from pgqueue.claim(queue);
    return next is((m.id, m.attempt_count, m.last_error)::text, (new_id, 3, 'not now'::text)::text, kind || ': claim returns the message after the delay of a plain nack');
    perform pgqueue.ack(queue, new_id, m.claim_token);

    -- A delayed message that a plain insert puts into messages itself.
    perform pg_temp.begin_with('0 s', has_table);
    new_id := pg_temp.send('{"order_id": 1006}', 30);
    ids := array[pgqueue.enqueue(queue, '{"order_id": 1007}')];
    return next is((select array_agg(c.id) from pgqueue.claim(queue, 10) c), ids, kind || ': claim does not return a message that a plain insert delays');
    return next is((select array_agg(b.id) from pgqueue.browse(queue, 'scheduled') b), array[new_id], kind || ': browse shows a message that a plain insert delays as scheduled');
    perform pg_temp.shift('31 s');
    return next ok(exists (select from pgqueue.claim(queue, 10) c where c.id = new_id), kind || ': claim returns a message that a plain insert delayed when it is due');

    -- A message that plain SQL claims until max_attempts is reached.
    perform pg_temp.begin_with('-1 min', has_table);
    new_id := pg_temp.send('{"order_id": 1008}');
    for i in 1..5 loop
        perform pg_temp.take();
        perform pg_temp.settle('nack', new_id, 'worker-1', '0', 'attempt ' || i);
    end loop;
    return next is(pg_temp.take(), '{}'::bigint[], kind || ': a plain claim does not return a message whose attempts are exhausted');
    perform pg_temp.shift('1 s');
    perform pgqueue.claim(queue);
    return next is((select (d.id, d.attempt_count, d.reason, d.last_error, d.claimed_by)::text from pgqueue.browse_dead_messages(queue) d),
        (new_id, 5, 'attempts_exhausted'::text, 'attempt 5'::text, 'worker-1'::text)::text, kind || ': the next claim moves a message with exhausted attempts to the dead letters, with its last_error');
    perform pgqueue.drop_queue(queue);
end;
$$;
select pg_temp.mixes('shared', false, 'raw');
select pg_temp.mixes('dedicated', true, 'raw');
select pg_temp.mixes('views, shared', false, 'verbatim');
select pg_temp.mixes('views, dedicated', true, 'verbatim');

-- A nested loop runs a subquery with "for update skip locked" again for each row. The form of the reference picks the
-- messages once, whatever the plan.
create temp table plans (form text, statement text);
insert into plans
select schema, format(replace($$
with picked as materialized (
    select id from %1$I.messages
    where queue_name = 'order-events' and visible_at <= now() and attempt_count < max_attempts
    order by id for update skip locked limit 10
)
update %1$I.messages m
set visible_at = now() + interval '60 seconds', attempt_count = m.attempt_count + 1, claimed_by = 'worker-1'
from picked p
where m.queue_name = 'order-events' and m.id = p.id
returning m.id
$$, e'\n', ' '), schema) from unnest(array['pgqueue', 'mdb_queue']) schema;
create function pg_temp.claimed(statement text) returns bigint language plpgsql as $$
declare
    id bigint;
    n bigint := 0;
begin
    for id in execute statement loop
        n := n + 1;
    end loop;
    return n;
end;
$$;
select pg_temp.begin_with('-1 min', true);
insert into pgqueue.messages (queue_name, payload, visible_at) select 'order-events', '1', now() from generate_series(1, 1000);
savepoint nested_loops;
set local enable_hashjoin = off;
set local enable_mergejoin = off;
set local enable_hashagg = off;
set local enable_sort = off;
set local enable_material = off;
set local enable_memoize = off;
select cmp_ok(cardinality(pg_temp.take()), '>', 10, 'a nested loop runs the subquery of a plain update again, which then claims too many messages');
update pgqueue.messages set visible_at = now() where queue_name = 'order-events';
select is(pg_temp.claimed(p.statement), 10::bigint, format('a nested loop does not run a materialized subquery of a plain update on %s again', p.form)) from plans p order by p.form;
rollback to nested_loops;
select is(pg_temp.claimed(p.statement), 10::bigint, format('a plain update with a materialized subquery on %s claims at most its limit', p.form)) from plans p order by p.form;

-- The views.
select pg_temp.shift('0 s');
select results_eq(
    $$ select c.relname::text collate "C" from pg_class c where c.relnamespace = 'mdb_queue'::regnamespace order by 1 $$,
    $$ values ('archived_messages' collate "C"), ('dead_messages'), ('messages'), ('queues'), ('scheduled_messages'), ('unfiled_messages') $$,
    'the schema has a view for each table that raw access includes');
select is_empty($$ select c.relname from pg_class c where c.relnamespace = 'mdb_queue'::regnamespace and obj_description(c.oid, 'pg_class') is null $$, 'every view has a comment');
select is_empty(
    $$ select a.attrelid::regclass, a.attname from pg_attribute a join pg_class c on c.oid = a.attrelid
    where c.relnamespace = 'pgqueue'::regnamespace and c.relname in (select v.relname from pg_class v where v.relnamespace = 'mdb_queue'::regnamespace)
        and a.attnum > 0 and not exists (
            select from pg_attribute v where v.attrelid = to_regclass('mdb_queue.' || c.relname) and v.attname = a.attname and v.atttypid = a.atttypid) $$,
    'every view has all columns of its table');
select is(pgqueue.expose_contract('mdb_queue'), false, 'expose_contract returns false if the schema has the views');
select pgqueue.create_queue('shown') is not null as made \gset
select pgqueue.reject('shown', m.id, m.claim_token, 'why') as rejected from (select pgqueue.enqueue('shown', '1')) e, pgqueue.claim('shown') m \gset
select results_eq($$ select queue_name, reason, last_error from mdb_queue.dead_messages $$, $$ values ('shown' collate "C", 'rejected', 'why') $$, 'the view dead_messages shows dead letters');

-- Rights: those on the tables decide.
create role pgqueue_test_raw;
create role pgqueue_test_reader;
create role pgqueue_test_producer;
create role pgqueue_test_nobody;
select lives_ok(format('select pgqueue.grant_access(%L, %L)', 'pgqueue_test_' || a, a), format('grant_access grants %s access', a)) from unnest(array['raw', 'reader', 'producer']) a;
select pg_temp.begin_with('-1 min', false);
set local role pgqueue_test_raw;
select lives_ok($$ execute verbatim_enqueue('order-events', '{"order_id": 1}', 0) $$, 'a role with raw access may send through the views');
select lives_ok($$ execute verbatim_claim $$, 'a role with raw access may claim through the views');
select lives_ok($$ execute verbatim_extend(1, 'worker-1', 60) $$, 'a role with raw access may extend a claim through the views');
select lives_ok($$ execute verbatim_nack(1, 'worker-1', 0, 'why') $$, 'a role with raw access may give back a message through the views');
select lives_ok($$ execute verbatim_ack(1, 'worker-1') $$, 'a role with raw access may acknowledge through the views');
select lives_ok(format('select from mdb_queue.%I', t), format('a role with raw access may read the view %s', t)) from unnest(array['queues', 'dead_messages', 'scheduled_messages', 'archived_messages', 'unfiled_messages']) t;
select throws_ok($$ update mdb_queue.queues set max_attempts = 1 $$, '42501', null, 'a role with raw access may not change a queue through the views');
set local role pgqueue_test_reader;
select lives_ok($$ select from mdb_queue.messages $$, 'a reader may read the views');
select throws_ok($$ execute verbatim_claim $$, '42501', null, 'a reader may not claim through the views');
select throws_ok($$ execute verbatim_ack(1, 'worker-1') $$, '42501', null, 'a reader may not acknowledge through the views');
set local role pgqueue_test_producer;
select throws_ok($$ select from mdb_queue.messages $$, '42501', null, 'a producer may not read the views');
select throws_ok($$ execute verbatim_enqueue('order-events', '1', 0) $$, '42501', null, 'a producer may not send through the views');
set local role pgqueue_test_nobody;
select throws_ok(format('select from mdb_queue.%I', t), '42501', null, format('a role without access may not read the view %s', t)) from unnest(array['queues', 'messages', 'dead_messages', 'scheduled_messages', 'archived_messages', 'unfiled_messages']) t;
reset role;
select pgqueue.revoke_access('pgqueue_test_raw', 'raw');
set local role pgqueue_test_raw;
select throws_ok($$ execute verbatim_claim $$, '42501', null, 'a role whose raw access was revoked may not claim through the views');
reset role;

-- The caller of expose_contract.
create role pgqueue_test_admin;
create role pgqueue_test_owner;
select lives_ok($$ select pgqueue.grant_access('pgqueue_test_admin', 'admin') $$, 'grant_access grants admin access');
create schema pgqueue_test_given;
set local role pgqueue_test_admin;
select throws_ok($$ select pgqueue.expose_contract('pgqueue_test_mine') $$, '42501', null, 'a caller without the CREATE privilege on the database may not create the schema');
select throws_ok($$ select pgqueue.expose_contract('pgqueue_test_given') $$, '42501', 'role pgqueue_test_admin may not create relations in schema pgqueue_test_given', 'a caller without the CREATE privilege on an existing schema may not create the views');
reset role;
do $$ begin execute format('grant create on database %I to pgqueue_test_admin', current_database()); end $$;
grant create on schema pgqueue_test_given to pgqueue_test_admin;
set local role pgqueue_test_admin;
select is(pgqueue.expose_contract('pgqueue_test_mine'), true, 'an admin with the CREATE privilege on the database may create the schema');
select is(pgqueue.expose_contract('pgqueue_test_given'), true, 'expose_contract creates the views in an existing schema');
select is(pgqueue.unexpose_contract('pgqueue_test_mine'), true, 'unexpose_contract drops the views');
reset role;
select is(to_regnamespace('pgqueue_test_mine'), null, 'unexpose_contract drops a schema that expose_contract created');
select is(pgqueue.unexpose_contract('pgqueue_test_given'), true, 'unexpose_contract drops the views in an existing schema');
select isnt(to_regnamespace('pgqueue_test_given'), null, 'unexpose_contract leaves a schema that expose_contract did not create');
select is(pgqueue.unexpose_contract('pgqueue_test_given'), false, 'unexpose_contract returns false if the schema has no such views');
select is(pgqueue.unexpose_contract('pgqueue_test_nowhere'), false, 'unexpose_contract returns false if there is no such schema');

-- Other objects in the schema.
create table pgqueue_test_given.messages (mine int);
create view pgqueue_test_given.queues as select 1 as mine;
select throws_ok($$ select pgqueue.expose_contract('pgqueue_test_given') $$, '42P07', null, 'expose_contract refuses a schema in which a name is taken');
select is(pgqueue.unexpose_contract('pgqueue_test_given'), false, 'unexpose_contract drops no view of another application');
select results_eq($$ select mine from pgqueue_test_given.queues $$, array[1], 'a view of another application stays');
create table mdb_queue.mine ();
create view public.pgqueue_test_dependent as select m.id from mdb_queue.messages m;
select throws_ok($$ select pgqueue.unexpose_contract('mdb_queue') $$, '2BP01', null, 'unexpose_contract refuses to drop a view on which another object depends');
drop view public.pgqueue_test_dependent;
drop view mdb_queue.dead_messages;
select is(pgqueue.expose_contract('mdb_queue'), true, 'expose_contract creates a view that was dropped by hand');
select is(pgqueue.unexpose_contract('mdb_queue'), true, 'unexpose_contract drops the views beside another table');
select has_table('mdb_queue', 'mine', 'unexpose_contract leaves another table and its schema');
drop table mdb_queue.mine;
drop schema mdb_queue;
select is(pgqueue.expose_contract(), true, 'the default schema is mdb_queue');
select has_view('mdb_queue', 'messages', 'the default schema has the views');
select is(pgqueue.unexpose_contract(), true, 'unexpose_contract has the same default');

-- Names.
select is(pgqueue.expose_contract('A "schema"; drop schema pgqueue cascade; --'), true, 'expose_contract quotes the name of the schema');
select results_eq($$ select name from "A ""schema""; drop schema pgqueue cascade; --".queues where name = 'shown' $$, $$ values ('shown' collate "C") $$, 'a view in a schema with any name can be read');
select is(pgqueue.unexpose_contract('A "schema"; drop schema pgqueue cascade; --'), true, 'unexpose_contract quotes the name of the schema');
select is(pgqueue.expose_contract(repeat('ß', 31) || 's'), true, 'expose_contract accepts a name of 63 bytes');
select throws_ok(format('select pgqueue.%s(%L)', verb, name), '22023', format('invalid schema_name: %s', coalesce(quote_literal(name), 'null')), format('%s refuses the schema %s', verb, coalesce(quote_literal(name), 'null')))
from unnest(array['expose_contract', 'unexpose_contract']) verb, unnest(array['pgqueue', 'pg_catalog', 'pg_temp', 'pg_mine', 'information_schema', '', repeat('x', 64), null]) name;

select * from finish();
rollback;
