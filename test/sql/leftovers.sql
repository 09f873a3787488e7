begin;
-- The locks make test files wait for each other: this file attaches tables and sets the number of the next queue back.
lock table pgqueue.messages in access exclusive mode;
alter sequence pgqueue.queue_id restart;
select plan(142);

create temp table kinds (kind text, settings text, has_table boolean);
insert into kinds values
('plain', '', false), ('dedicated', 'dedicated => true', true), ('grouped', 'group_limit => 1', false), ('prioritized', 'priorities => true', false),
('limited', 'max_in_flight => 1, rate_limit => 7', false), ('rated', 'rate_limit => 7', false), ('archived', 'archive_for => ''1 day''', false),
('uncounted', 'counters => false', false), ('exposed', '', true);
create function pg_temp.make(queue text, kind text, more text default null) returns boolean language plpgsql as $$
declare
    is_dedicated boolean;
begin
    execute format('select q.dedicated from pgqueue.create_queue(%s) q',
        concat_ws(', ', quote_literal(queue), nullif((select k.settings from kinds k where k.kind = make.kind), ''), more)) into is_dedicated;
    return is_dedicated;
end;
$$;
-- The state after a restore without rows.
create function pg_temp.forget() returns void language plpgsql as $$
declare
    t regclass;
begin
    for t in select c.oid from pg_class c where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'r' loop
        execute format('delete from only %s', t);
    end loop;
    alter sequence pgqueue.queue_id restart;
end;
$$;
-- The relations of a queue, without its number and name.
create function pg_temp.parts(queue text) returns text[] language sql as $$
    select array(
        select regexp_replace(c.relname, '_(\d+|[0-9a-f]{8,})(_|$)', '_N\2') collate "C"
        from pgqueue.queues q join pg_class c on c.relnamespace = 'pgqueue'::regnamespace
            and (c.relname ~ format('^(queue|messages|transports)_%s(_|$)', q.queue_id)
                or c.relname ~ format('_(%s|%s)$', to_hex(hashtextextended(queue collate "C", 0)), left(encode(sha256(convert_to(queue, 'UTF8')), 'hex'), 56)))
        where q.name = queue
        order by 1)
$$;
create function pg_temp.findings() returns text[] language sql as $$
    select array(select (f.finding || coalesce(' ' || f.queue_name, '')) collate "C" from pgqueue.doctor() f
        where f.finding not in ('hidden_transactions', 'pinned_horizon', 'compaction', 'uncompacted_table') order by 1)
$$;
create function pg_temp.works(queue text) returns boolean language plpgsql as $$
declare
    sent bigint := pgqueue.enqueue(queue, '1');
    m pgqueue.message;
begin
    select * into m from pgqueue.claim(queue);
    return m.id = sent and pgqueue.ack(queue, m.id, m.claim_token) and pgqueue.peek(queue) = 0;
end;
$$;

-- What a new queue of each kind consists of; with_table: if it is dedicated, too.
create temp table fresh as
select k.kind, w.with_table, pg_temp.make(format('fresh-%s-%s', k.kind, w.with_table), k.kind, case when w.with_table and k.kind <> 'dedicated' then 'dedicated => true' end) as made
from kinds k cross join (values (false), (true)) w (with_table);
select pgqueue.expose_transport(format('fresh-%s-%s', k.kind, true), table_name => 'fresh_' || k.kind) as exposed from kinds k where k.kind = 'exposed' \g /dev/null
create temp table expected as select f.kind, f.with_table, pg_temp.parts(format('fresh-%s-%s', f.kind, f.with_table)) as parts from fresh f;
select pgqueue.drop_queue(format('fresh-%s-%s', f.kind, f.with_table)) as dropped from fresh f \g /dev/null
select is(pg_temp.findings(), '{}', 'doctor finds nothing left of queues that were dropped');

-- Any kind of queue, where a queue of any kind was.
create function pg_temp.replaces() returns setof text language plpgsql as $$
declare
    former record;
    latter record;
    wanted text[];
begin
    for former in select * from kinds loop
        for latter in select * from kinds k where k.kind in ('plain', 'grouped', 'limited') or k.kind = former.kind and k.kind <> 'exposed' loop
            alter sequence pgqueue.queue_id restart;
            perform pg_temp.make('left', former.kind), pgqueue.enqueue('left', '1');
            if former.kind = 'exposed' then
                perform pgqueue.expose_transport('left', table_name => 'left_relation');
            end if;
            perform pg_temp.forget();
            perform pg_temp.make('left', latter.kind);
            select e.parts into wanted from expected e where e.kind = latter.kind and e.with_table = (former.has_table and latter.kind not in ('grouped', 'prioritized', 'limited') or latter.has_table);
            if former.kind = 'exposed' and latter.kind = 'plain' then
                select e.parts into wanted from expected e where e.kind = 'exposed' and e.with_table;
            end if;
            return next is(pg_temp.parts('left'), wanted, format('kind %s, created where kind %s was left, consists of what a new queue does', latter.kind, former.kind));
            return next ok(pg_temp.works('left'), format('kind %s, created where kind %s was left, works', latter.kind, former.kind));
            if latter.kind = 'plain' then
                return next is(pg_temp.findings(), '{}', format('doctor finds nothing wrong with a plain queue that was created where kind %s was left', former.kind));
                return next is(to_regclass('left_relation') is not null, former.kind = 'exposed', format('the relation of a transport is there if the queue had one: kind %s', former.kind));
            end if;
            perform pgqueue.drop_queue('left');
            return next is_empty('select * from pgqueue._leftovers()', format('drop_queue leaves nothing of kind %s, created where kind %s was left', latter.kind, former.kind));
        end loop;
    end loop;
end;
$$;
select pg_temp.replaces();

-- All queues again, in another order, with a new one between them.
create role pgqueue_test_left;
select pg_temp.make('left-' || k.kind, k.kind) as made from kinds k \g /dev/null
select pgqueue.expose_transport('left-exposed', table_name => 'left_relation') as relation \g /dev/null
create view left_view as select r.seq from left_relation r;
grant select on left_relation to pgqueue_test_left;
select pgqueue.grant_access('pgqueue_test_left', a, n) as granted from (values ('consumer', 'left-plain'), ('transport', 'left-*')) w (a, n) \g /dev/null
select pg_temp.forget() \g /dev/null
select is(pg_temp.findings(), '{leftovers,"leftovers left-dedicated","leftovers left-exposed"}'::text[], 'doctor reports each table that is left, and the other relations once');
select is((select f.repair from pgqueue.doctor() f where f.queue_name = 'left-dedicated'), 'select pgqueue.create_queue(''left-dedicated'');', 'the repair of a table that is left is to create its queue');
select results_eq('select queue_name from pgqueue.list_access()', '{left-*}'::text[], 'list_access does not list the access to a queue that does not exist');
select is((select count(*) from left_relation), 0::bigint, 'the relation of a transport that is left can be read');
select throws_ok($$ insert into left_relation (headers, body) values ('{}', '') $$, 'PQ001', null, 'the relation of a transport that is left refuses a message with PQ001');
select is(array(select pg_temp.make('left-' || k.kind, k.kind) from (select k.* from kinds k where k.kind <> 'dedicated' union all values ('new', '', false), ('dedicated', 'dedicated => true', true)) k order by k.kind desc),
    array(select k.has_table from (select k.* from kinds k union all values ('new', '', false)) k order by k.kind desc), 'all queues can be created again, those with a table as dedicated ones');
select ok(pg_temp.works('left-' || k.kind), format('the %s queue works', k.kind)) from (select k.kind from kinds k where k.kind <> 'exposed' union all values ('new')) k;
select lives_ok($$ insert into left_relation (headers, body) values ('{}', '') $$, 'the relation of a transport takes a message after its queue was created');
select is((select count(*) from left_view), 1::bigint, 'the relation and a view over it show the message');
select set_eq('select queue_name from pgqueue.list_access()', '{left-*,left-plain}'::text[], 'the access of a role to a queue is back when the queue is');
select ok(has_table_privilege('pgqueue_test_left', 'left_relation', 'select'), 'a privilege on the relation is kept');
select is(pg_temp.findings(), '{leftovers}'::text[], 'the registers of the queues that had other numbers are still left');
select lives_ok((select f.repair from pgqueue.doctor() f where f.finding = 'leftovers'), 'the repair of leftovers runs');
select is(pg_temp.findings(), '{}', 'the repair of leftovers drops the rest');
select ok(pg_temp.works('left-' || k.kind), format('the %s queue works after the repair', k.kind)) from kinds k where k.kind in ('plain', 'prioritized');

-- Messages that are in a table without its queue stay.
select pgqueue.enqueue('left-dedicated', '"kept"') as sent \gset
delete from pgqueue.queues where name = 'left-dedicated';
select lives_ok('select pgqueue._drop_leftovers()', 'the repair of leftovers runs while a table has messages without a queue');
select is(pg_temp.make('left-dedicated', 'dedicated'), true, 'a queue can be created for the table that has messages');
select is((select c.payload from pgqueue.claim('left-dedicated') c), '"kept"', 'claim returns the message that was in the table');

select * from finish();
rollback;
