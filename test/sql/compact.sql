begin;
-- The lock makes test files wait for each other: this file attaches a table.
lock table pgqueue.messages in access exclusive mode;
select plan(113);

create function pg_temp.rows_of(relation regclass) returns text language plpgsql as $$
declare
    answer text;
begin
    execute format('select string_agg(t::text, e''\n'' order by t::text) from only %s t', relation) into answer;
    return answer;
end;
$$;
create function pg_temp.compact(relation regclass) returns pgqueue.compaction language plpgsql as $$
declare
    done pgqueue.compaction;
begin
    select c.* into done from pgqueue._compactable_tables() t, pgqueue._compact_table(t.relation) c
    where t.relation = compact.relation;
    return done;
end;
$$;

-- Every table, with a row in each.
select pgqueue.create_queue('compact', archive_for => '1 day') is not null as made, pgqueue.create_queue('compact_own', dedicated => true) is not null as made_own \gset
select lives_ok($$ select pgqueue.expose_transport('compact_own') $$, 'a dedicated queue is exposed');
insert into compact_own (headers, body) values ('{"a":"1"}', 'one'), ('{"a":"2"}', 'two');
select pgqueue.enqueue('compact', payload => to_jsonb((select string_agg(md5(g::text), '') from generate_series(1, 6000) g)), headers => '{"a": [1]}', expires_in => '1 h', message_id => gen_random_uuid()) as sent \gset
select pgqueue.enqueue('compact', body => '\x00ff') as body \gset
select count(*) as claimed from pgqueue.claim('compact', 1, claimed_by => 'me') \gset
select pgqueue.enqueue('compact', '1', delay => '1 h') as later \gset
select pgqueue.enqueue('compact', '"dead"') as dead \gset
select count(pgqueue.reject('compact', c.id, c.claim_token, 'why')) as rejected from pgqueue.claim('compact', 2) c \gset
insert into pgqueue.requeued_messages values ('compact', '-infinity', :sent);
select pgqueue.create_queue('compact_grouped', group_limit => 1), pgqueue.create_queue('compact_prioritized', priorities => true), pgqueue.create_queue('compact_limited', max_in_flight => 1), pgqueue.create_queue('compact_both', priorities => true, max_in_flight => 1) \g /dev/null
select pgqueue.enqueue(format('compact_%s', k), '1') from unnest('{grouped,prioritized,limited,both}'::text[]) k \g /dev/null
insert into pgqueue.dedup_keys select n, q.queue_id, 'key', 7, :sent, now() from pgqueue.queues q, generate_series(0, 8) n where q.name = 'compact';
select pgqueue.stream_open('compact', 's') is not null as opened \gset
select pgqueue.create_schedule('compact', 'compact', '@hourly') is not null as scheduled \gset
select pgqueue.sink_stage('compact', gen_random_uuid(), 0, 0) as token \gset
insert into pgqueue.staged_messages (token, row_number, payloads, dedup_keys) values (:'token', 1, array['1', '"two"']::jsonb[], array[null, 'key']);
select pgqueue.sink_commit(gen_random_uuid(), '{}', '{}', 'compact', 1) as committed \gset

create temp table before as
select t.relation, pg_temp.rows_of(t.relation) as content, pg_relation_filenode(t.relation) as file from pgqueue._compactable_tables() t;
select isnt(b.content, null, format('the test has a row in %s', b.relation)) from before b order by b.relation::text;
create temp table done as select (pg_temp.compact(b.relation)).* from before b;
select is(d.outcome, 'compacted', format('%s is compacted', d.table_name)) from done d order by d.table_name;
select is(pg_temp.rows_of(b.relation), b.content, format('a compaction of %s changes no row', b.relation)) from before b order by b.relation::text;
select is((select count(*) from before b where pg_relation_filenode(b.relation) = b.file), 0::bigint, 'every compacted table has a new file');
select is((select count(*) from pgqueue.messages m where m.queue_name = 'compact' and m.claim_token is not null and m.claimed_by = 'me'), 1::bigint, 'a claim survives a compaction');
select is((select pgqueue.ack('compact', m.id, m.claim_token) from pgqueue.messages m where m.id = :sent), true, 'ack after a compaction succeeds with the token of the claim');
select results_eq($$ select t.body, t.seq from compact_own t order by t.seq $$, $$ values ('one'::bytea, 1::bigint), ('two', 2) $$, 'the relation of a transport shows the same rows after a compaction');
insert into compact_own (headers, body) values ('{}', 'three');
select results_eq($$ select max(t.seq) from compact_own t $$, array[3::bigint], 'the trigger of the relation works after a compaction');

-- Limits.
select pgqueue.create_queue('compact_deep', dedicated => true) is not null as made \gset
select pgqueue._partition_of(q) as deep from pgqueue.queues q where q.name = 'compact_deep' \gset
select count(*) as sent_batch from pgqueue.enqueue_batch('compact_deep', array(select '1'::jsonb from generate_series(1, 10001))) \gset
select is((pg_temp.compact(:'deep')).outcome, 'backlog', 'a table with more than 10,000 rows is not compacted');
select is((select count(*) from pgqueue.messages m where m.queue_name = 'compact_deep'), 10001::bigint, 'an attempt that compacts nothing changes no row');
select is(pgqueue.purge_queue('compact_deep'), 10001::bigint, 'the queue is purged');
insert into pgqueue.messages (queue_name, kind, body) select 'compact_deep', (select q.kind from pgqueue.queues q where q.name = 'compact_deep'), decode(string_agg(md5((n * 1000 + g)::text), ''), 'hex') from generate_series(1, 9) n, generate_series(1, 65536) g group by n;
select is((pg_temp.compact(:'deep')).outcome, 'backlog', 'a table with more than 8 MB of living rows is not compacted');
select is(pgqueue.purge_queue('compact_deep'), 9::bigint, 'the large messages are still there');

-- Obstacles.
create function pg_temp.nothing() returns trigger language plpgsql as 'begin return new; end';
create trigger of_user after insert on pgqueue.dead_messages for each row execute function pg_temp.nothing();
select is((pg_temp.compact('pgqueue.dead_messages')).outcome, 'trigger', 'a table with a trigger of the user for inserts is not compacted');
drop trigger of_user on pgqueue.dead_messages;

set local client_min_messages = error;
create publication compact_all for all tables;
select is((pg_temp.compact('pgqueue.dead_messages')).outcome, 'compacted', 'a published table is compacted if the truncation is published');
alter publication compact_all set (publish = 'insert, update, delete');
select is((pg_temp.compact('pgqueue.dead_messages')).outcome, 'published', 'a published table is not compacted if the truncation is not published');
select is((pg_temp.compact('pgqueue.messages_shared')).outcome, 'published', 'a partition is not compacted if the truncation is not published');
alter publication compact_all set (publish = 'insert, update, delete, truncate', publish_via_partition_root = true);
select is((pg_temp.compact('pgqueue.messages_shared')).outcome, 'published', 'a partition that is published through its parent is not compacted');
select is((pg_temp.compact('pgqueue.dedup_keys_0')).outcome, 'published', 'a table of keys that is published through its parent is not compacted');
drop publication compact_all;
reset client_min_messages;

-- The verbs.
select is_empty($$ select * from pgqueue.compact_queue('compact') $$, 'compact_queue leaves tables under 1 MB alone');
select count(*) as sent_batch from pgqueue.enqueue_batch('compact_deep', array(select '1'::jsonb from generate_series(1, 6000))) \gset
delete from pgqueue.messages m where m.queue_name = 'compact_deep' and m.id % 100 > 0;
select results_eq($$ select c.table_name collate "C", c.outcome collate "C", c.rows_kept, c.bytes_before > 1048576, c.bytes_after < 200000 from pgqueue.compact_queue('compact_deep') c $$,
    format($$ values (%L collate "C", 'compacted' collate "C", 60::bigint, true, true) $$, :'deep'), 'compact_queue returns what it has done, and the sizes before and after');

-- What a sweep requests.
create or replace function pgqueue._overgrown_tables() returns table (relation regclass, bytes bigint, living_rows bigint, dead_rows bigint) language sql volatile
as $$ select 'pgqueue.dead_messages'::regclass, coalesce(nullif(current_setting('test.bytes', true), ''), '67108863')::bigint, 1::bigint, coalesce(nullif(current_setting('test.dead', true), ''), '49999')::bigint where current_setting('test.overgrown', true) = 'yes' $$;
create or replace function pgqueue._pinned_transactions() returns bigint language sql volatile as $$ select coalesce(nullif(current_setting('test.pinned', true), ''), '0')::bigint $$;
create or replace function pgqueue._horizon_holders() returns table (pinned_for interval, holder text, repair text) language sql stable
as $$ select nullif(current_setting('test.pinned_for', true), '')::interval, 'a test', '' $$;
create function pg_temp.requests(overgrown text, pinned int, compaction text) returns bigint language plpgsql as $$
begin
    perform set_config('test.overgrown', overgrown, true), set_config('test.pinned', pinned::text, true), set_config('pgqueue.compaction', compaction, true);
    delete from pgqueue.compactions;
    perform setval('pgqueue.next_maintenance_at', 1), setval(q.next_sweep_at, 1) from pgqueue.queues q where q.name = 'compact';
    perform pgqueue.claim('compact');
    perform setval(q.next_sweep_at, 1) from pgqueue.queues q where q.name = 'compact';
    perform pgqueue.claim('compact');
    return (select count(*) from pgqueue.compactions c where c.handler = '_compact_overgrown');
end;
$$;
select is(pg_temp.requests('yes', 50000, 'on'), 1::bigint, 'claims request a compaction at most once a second if a table is overgrown and the horizon is pinned');
select is(pg_temp.requests('no', 50000, 'on'), 0::bigint, 'claims request no compaction if no table is overgrown');
select is(pg_temp.requests('yes', 49999, 'on'), 0::bigint, 'claims request no compaction if the horizon is not pinned');
select is(pg_temp.requests('yes', 0, 'on'), 1::bigint, 'claims request a compaction of a table of 64 MB if the horizon is pinned for more than five seconds')
from set_config('test.bytes', '67108864', true) a, set_config('test.pinned_for', '6 s', true) b;
select is(pg_temp.requests('yes', 0, 'on'), 0::bigint, 'claims request no compaction of a smaller table then') from set_config('test.bytes', '', true);
select is(pg_temp.requests('yes', 0, 'on'), 1::bigint, 'claims request a compaction of a smaller table with 50,000 dead rows then') from set_config('test.dead', '50000', true);
select set_config('test.dead', '', true) \g /dev/null
select is(pg_temp.requests('yes', 0, 'on'), 0::bigint, 'claims request no compaction of a table of 64 MB if the horizon is pinned for less')
from set_config('test.bytes', '67108864', true) a, set_config('test.pinned_for', '5 s', true) b;
select is(pg_temp.requests('yes', n, 'on'), requested, format('claims make %s request for a table of 64 MB if the horizon is %s transactions old, and nobody knows for how long', requested, n))
from (values (100, 1::bigint), (99, 0)) as v (n, requested), set_config('test.pinned_for', '', true) s;
select set_config('test.bytes', '', true) as reset \gset
select is(pg_temp.requests('yes', 50000, 'off'), 0::bigint, 'claims request no compaction if it is set to off');
select is(pg_temp.requests('yes', 50000, ''), exists (select from pg_extension e where e.extname = 'pgqueue')::int::bigint, 'by default claims request compactions only if pgqueue is an extension');

delete from pgqueue.compactions;
select pgqueue._request_at_commit('_compact_overgrown', now()) \g /dev/null
select pg_relation_filenode('pgqueue.dead_messages') as file \gset
set constraints pgqueue.do_at_commit immediate;
select is(pg_relation_filenode('pgqueue.dead_messages'), :file::oid, 'set constraints carries out no request, because the transaction does not end');
set constraints pgqueue.do_at_commit deferred;
select set_config('test.overgrown', 'yes', true), set_config('test.pinned', '0', true), pgqueue._compact_overgrown(now()) \g /dev/null
select is(pg_relation_filenode('pgqueue.dead_messages'), :file::oid, 'no table is compacted if the horizon is not pinned any more');
select set_config('test.pinned', '50000', true) as set \gset
select lives_ok($$ select pgqueue._compact_overgrown(now()) $$, 'a request is carried out');
select isnt(pg_relation_filenode('pgqueue.dead_messages'), :file::oid, 'the overgrown table has been rewritten');
select results_eq($$ select c.table_name || ' ' || c.outcome from pgqueue.compactions c where c.outcome is not null $$, array['pgqueue.dead_messages compacted'], 'the outcome is recorded');

insert into pgqueue.dead_messages (id, queue_name, payload, reason, died_at, enqueued_at, attempt_count, max_attempts)
select -n, 'compact', '1', 'rejected', now(), now(), 1, 1 from generate_series(1, 10001) n;
select pgqueue._compact_overgrown(now()) as tried \gset
select is(pgqueue._from_micros(pg_sequence_last_value('pgqueue.next_maintenance_at')), now() + interval '1 min', 'after an attempt that met too many living rows, the next one is due in a minute');
delete from pgqueue.dead_messages d where d.id < 0;

select is((select f.detail from pgqueue.doctor() f where f.finding = 'uncompacted_table'),
    'pgqueue.dead_messages occupies 64 MB for about 1 living rows, and the next enqueues or sweeps compact it', 'doctor reports a table that is nearly all dead')
from set_config('test.pinned', '50000', true) a, set_config('pgqueue.compaction', 'on', true) b;
select is((select f.detail from pgqueue.doctor() f where f.finding = 'uncompacted_table'),
    'pgqueue.dead_messages occupies 64 MB for about 1 living rows, and automatic compaction is off', 'doctor says that automatic compaction is off')
from set_config('pgqueue.compaction', 'off', true);
select is((select f.detail from pgqueue.doctor() f where f.finding = 'compaction'),
    'the horizon is 50000 transactions old: vacuum does not help, and automatic compaction is off', 'doctor says that automatic compaction is off while the horizon is pinned');
select is_empty($$ select f.detail from pgqueue.doctor() f where f.finding = 'compaction' $$, 'doctor reports nothing about compaction while the horizon is not pinned')
from set_config('test.pinned', '49999', true);
select pgqueue._is_compaction_on() from set_config('test.pinned', '50000', true) \g /dev/null
create trigger of_user after insert on pgqueue.dead_messages for each row execute function pg_temp.nothing();
select alike((select f.detail from pgqueue.doctor() f where f.finding = 'uncompacted_table'), '%a trigger of another schema would fire', 'doctor names the obstacle');

select * from finish();
rollback;
