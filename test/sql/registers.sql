begin;
-- The lock makes test files wait for each other: this file attaches a table and stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';
create function pg_temp.pass(span interval) returns void language sql
as $$ select set_config('test.now', (current_setting('test.now')::timestamptz + span)::text, true) $$;

select plan(34);

select is(pgqueue._from_micros(pgqueue._to_micros(m)), m, format('the register conversion and its inverse keep %s', m))
from unnest(array['1970-01-01 00:00:00+00', '2026-11-21 01:02:03.456789+00', '2105-12-31 23:59:59.999999+00']::timestamptz[]) m;
select is(pgqueue._to_micros('1970-01-01 00:00:01.000001+00'), 1000001::bigint, 'a register counts microseconds since 1970');
select is(pgqueue._to_micros(null), null, '_to_micros of null returns null');
select is(pgqueue._from_micros(null), null, '_from_micros of null returns null');
select ok(pgqueue._to_micros('10000-01-01 00:00:00+00') < 9223372036854775807, 'a register can hold a time thousands of years ahead');

create function pg_temp.has_registers(queue text, has_table boolean) returns setof text language plpgsql as $$
declare
    q pgqueue.queues;
    registers regclass[];
    id bigint;
begin
    perform pgqueue.create_queue(queue, dedicated => has_table, visibility_timeout => '30 s');
    select t.* into q from pgqueue.queues t where t.name = queue;
    registers := array[q.fresh_from_id, q.sweep_resume_id, q.next_sweep_at, q.first_due_at, q.waiting_until];
    return next is((select count(distinct c.oid) from pg_class c where c.oid = any (registers) and c.relkind = 'S' and c.relnamespace = 'pgqueue'::regnamespace), 5::bigint,
        queue || ': every queue has five registers, and each is a sequence');
    return next is((select count(*) from unnest(registers) r where pg_sequence_last_value(r) is null), 0::bigint, queue || ': every register of a new queue has a value');

    -- Registers are hints: every message is found whatever they hold.
    id := pgqueue.enqueue(queue, '1');
    perform setval(q.fresh_from_id, id + 1000000);
    perform setval(q.sweep_resume_id, id + 1000000);
    return next is((select c.id from pgqueue.claim(queue) c), id, queue || ': claim finds a message although the registers point far behind it');
    perform pg_temp.pass('1 min');
    perform setval(q.fresh_from_id, 1);
    perform setval(q.sweep_resume_id, 1);
    return next is((select c.id from pgqueue.claim(queue) c), id, queue || ': claim finds a message although the registers were set back');
    return next is((select count(*) from pgqueue.claim(queue)), 0::bigint, queue || ': claim does not return a claimed message although the registers were set back');
    perform pgqueue.purge_queue(queue);

    id := pgqueue.enqueue(queue, '2', delay => '10 s');
    perform setval(q.first_due_at, 9223372036854775807);
    perform pg_temp.pass('1 min');
    perform pgqueue.claim(queue);
    perform pg_temp.pass('1 min');
    perform pgqueue.claim(queue);
    return next is((select array_agg(b.id) from pgqueue.messages b where b.queue_name = queue and b.attempt_count > 0), array[id], queue || ': claim finds a due message although the register first_due_at says that none is due');
    perform pgqueue.purge_queue(queue);

    -- The state after only the tables were copied: the sequences hold no value.
    id := pgqueue.enqueue(queue, '3');
    perform pgqueue.enqueue(queue, '4', delay => '1 s');
    perform pg_temp.pass('1 s');
    execute (select string_agg(format('alter sequence %s restart', r), ';') from unnest(registers) r);
    return next is(pgqueue.peek(queue), 2, queue || ': peek works while the registers of the queue are empty');
    return next is((select count(*) from pgqueue.claim(queue, 10)), 2::bigint, queue || ': claim works while the registers of the queue are empty');
    perform pgqueue.enqueue(queue, '5');
    return next is((select count(*) from unnest(registers) r where pg_sequence_last_value(r) is null), 0::bigint, queue || ': claim and enqueue fill empty registers again');
    perform pgqueue.drop_queue(queue);
    return next is((select count(*) from pg_class c where c.oid = any (registers)), 0::bigint, queue || ': drop_queue drops the registers of the queue');
end;
$$;
-- Otherwise the claims below would not end.
create temp sequence empty_register;
do $$ begin assert pgqueue._register_value('empty_register') = 1, 'a register without a value is set to 1'; end $$;
select pg_temp.has_registers('registers_shared', false);
select pg_temp.has_registers('registers_dedicated', true);
select is(
    (select count(*) from pg_class c where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'S' and c.relname ~ '^queue_[0-9]+_'
        and not exists (select from pgqueue.queues q where c.oid in (q.fresh_from_id, q.sweep_resume_id, q.next_sweep_at, q.first_due_at, q.waiting_until))),
    0::bigint, 'every register belongs to a queue');

-- A dump during which the queue is dropped or gets another kind has the numbers of its registers in place of their
-- names. In the other database such a number can be that of any relation.
select pgqueue.create_queue('registers_dumped', priorities => true), pgqueue.enqueue('registers_dumped', '6') \g /dev/null
create temp table dumped as select q.* from pgqueue.queues q where q.name = 'registers_dumped';
delete from pgqueue.queues where name = 'registers_dumped';
insert into pgqueue.queues (name, queue_id, priorities, fresh_from_id, sweep_resume_id, next_sweep_at, first_due_at, waiting_until)
select d.name, d.queue_id, d.priorities, '1', 'pgqueue.message_id', 'pg_class', '2', '3' from dumped d;
create function pg_temp.registers(queue text) returns regclass[] language sql
as $$ select array[q.fresh_from_id, q.sweep_resume_id, q.next_sweep_at, q.first_due_at, q.waiting_until] from pgqueue.queues q where q.name = queue $$;
select is(pg_temp.registers('registers_dumped'), (select array[d.fresh_from_id, d.sweep_resume_id, d.next_sweep_at, d.first_due_at, d.waiting_until] from dumped d),
    'a queue that a dump has without the names of its registers gets them by its number');
select is((select c.payload from pgqueue.claim('registers_dumped') c), '6', 'its messages are found');
-- Programs that load data often set this.
set local session_replication_role = replica;
select pgqueue.create_queue('registers_replica'), pgqueue.alter_queue('registers_replica', priorities => true) \g /dev/null
reset session_replication_role;
select is((select count(*) from unnest(pg_temp.registers('registers_replica')) r where pg_sequence_last_value(r) is null), 0::bigint, 'a queue that is created and altered while session_replication_role is replica has registers');
-- Triggers can be off in a restore, and come last in that of an installation by the SQL file.
alter table pgqueue.queues disable trigger find_registers;
update pgqueue.queues set fresh_from_id = '1', waiting_until = '2' where name = 'registers_dumped';
alter table pgqueue.queues enable trigger find_registers;
select results_eq($$ select f.severity, f.queue_name, f.repair from pgqueue.doctor() f where f.finding = 'missing_registers' $$,
    $$ values ('error', 'registers_dumped', 'update pgqueue.queues set fresh_from_id = fresh_from_id where name = ''registers_dumped'';') $$,
    'doctor finds the queue if no trigger has done so');
select repair from pgqueue.doctor() where finding = 'missing_registers' \gexec
select is(pg_temp.registers('registers_dumped'), (select array[d.fresh_from_id, d.sweep_resume_id, d.next_sweep_at, d.first_due_at, d.waiting_until] from dumped d), 'the repair finds its registers');
select is_empty($$ select f.finding from pgqueue.doctor() f where f.finding = 'missing_registers' $$, 'doctor is content then');

select * from finish();
rollback;
