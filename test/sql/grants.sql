begin;
-- The lock makes test files wait for each other: this file attaches a table.
lock table pgqueue.messages in access exclusive mode;
select plan(481);

create role pgqueue_test_producer;
create role pgqueue_test_consumer;
create role pgqueue_test_admin;
create role pgqueue_test_raw;
create role pgqueue_test_both;
create role pgqueue_test_nobody;
select lives_ok(format('select pgqueue.grant_access(%L, %L)', 'pgqueue_test_' || a, a), format('grant_access grants %s access', a)) from unnest(array['producer', 'consumer', 'admin', 'raw']) a;
select pgqueue.create_queue('grants', visibility_timeout => '30 s', max_attempts => 5) is not null as made \gset
select pgqueue.create_queue('grants_dedicated', dedicated => true) is not null as made \gset
select pgqueue.enqueue('grants', '"secret"') as sent \gset
select pgqueue.create_schedule('grants', 'grants', '@daily', '"secret"') is not null as made \gset
select pgqueue.enqueue('grants_dedicated', '"secret"') as sent_dedicated \gset

insert into pgqueue.streams (queue_name, stream_name, epoch, acked_seq, acked_token) values ('grants', 'given', 1, 1, '00000000-0000-0000-0000-000000000001'), ('grants', 'spare', 1, 0, null);
insert into pgqueue.streams (queue_name, stream_name, epoch, claim_token, ids, left_out, partitions, visibility_timeout, claimed_at, claimed_until, replays)
values ('grants', 'read', 1, '00000000-0000-0000-0000-000000000001', '{}', '{}', 1, '30 s', now(), now(), 0);

-- What each verb needs, as the contract says: producers enqueue and see the depth but no payload, consumers claim,
-- settle and browse, admins create, alter, drop, redrive and purge.
create temp table verbs (name text, statement text, producer boolean, consumer boolean, admin boolean);
insert into verbs values
('enqueue', 'select pgqueue.enqueue(''grants'', ''1'')', true, false, false),
('enqueue_batch', 'select pgqueue.enqueue_batch(''grants'', ''{1}'')', true, false, false),
('sink_stage', 'select pgqueue.sink_stage(''grants'', gen_random_uuid(), 0, 0)', true, false, false),
('sink_commit', 'select pgqueue.sink_commit(gen_random_uuid(), ''{}'', ''{}'')', true, false, false),
('sink_abort', 'select pgqueue.sink_abort(gen_random_uuid())', true, false, false),
('sweep_staged', 'select pgqueue.sweep_staged()', false, false, true),
('publish', 'select pgqueue.publish(''nobody.listens'', ''1'')', true, false, false),
('subscribe', 'select pgqueue.subscribe(''grants.#'', ''grants'')', false, true, true),
('unsubscribe', 'select pgqueue.unsubscribe(''grants.#'', ''grants'')', false, true, true),
('list_subscriptions', 'select pgqueue.list_subscriptions()', false, true, true),
('cancel', 'select pgqueue.cancel(''grants'', 1000000)', true, false, true),
('cancel_by_key', 'select pgqueue.cancel_by_key(''grants'', ''k'')', true, false, true),
('reschedule', 'select pgqueue.reschedule(''grants'', 1000000)', true, false, true),
('create_schedule', 'select pgqueue.create_schedule(''grants_new'', ''grants'', ''@daily'')', false, false, true),
('alter_schedule', 'select pgqueue.alter_schedule(''grants'')', false, false, true),
('run_schedule', 'select pgqueue.run_schedule(''grants'')', true, false, true),
('list_schedules', 'select pgqueue.list_schedules()', false, true, true),
('create_result', 'select pgqueue.create_result(''grants'', 1000000, gen_random_uuid())', true, false, false),
('update_result', 'select pgqueue.update_result(''grants'', 1000001, ''running'')', false, true, false),
('get_result', 'select pgqueue.get_result(gen_random_uuid())', true, true, true),
('purge_results', 'select pgqueue.purge_results(''grants'')', false, false, true),
('drop_schedule', 'select pgqueue.drop_schedule(''grants_new'')', false, false, true),
('claim', 'select pgqueue.claim(''grants'')', false, true, false),
('claim_any', 'select pgqueue.claim_any(''{grants}'')', false, true, false),
('receive', 'select pgqueue.receive(''grants'')', false, true, false),
('exchange', 'select pgqueue.exchange(''grants'', null, null)', false, true, false),
('ack', 'select pgqueue.ack(''grants'', 1, gen_random_uuid())', false, true, false),
('ack_batch', 'select pgqueue.ack_batch(''grants'', ''{1}'', gen_random_uuid())', false, true, false),
('ack_claims', 'select pgqueue.ack_claims(''grants'', ''{1}'', array[gen_random_uuid()])', false, true, false),
('nack', 'select pgqueue.nack(''grants'', 1, gen_random_uuid())', false, true, false),
('nack_claims', 'select pgqueue.nack_claims(''grants'', ''{1}'', array[gen_random_uuid()])', false, true, false),
('reject', 'select pgqueue.reject(''grants'', 1, gen_random_uuid())', false, true, false),
('record_failure', 'select pgqueue.record_failure(''grants'', 1000000, 1)', false, true, false),
('release', 'select pgqueue.release(''grants'', ''{1}'', gen_random_uuid())', false, true, false),
('release_claims', 'select pgqueue.release_claims(''grants'', ''{1}'', array[gen_random_uuid()])', false, true, false),
('extend', 'select pgqueue.extend(''grants'', 1, gen_random_uuid())', false, true, false),
('extend_batch', 'select pgqueue.extend_batch(''grants'', ''{1}'', gen_random_uuid())', false, true, false),
('extend_claims', 'select pgqueue.extend_claims(''grants'', ''{1}'', array[gen_random_uuid()])', false, true, false),
('prepare_wait', 'select pgqueue.prepare_wait(''grants'')', false, true, false),
('stream_open', 'select pgqueue.stream_open(''grants'', ''anew'')', false, true, false),
('stream_claim', 'select pgqueue.stream_claim(''grants'', ''given'', 1, 1, ''00000000-0000-0000-0000-000000000001'')', false, true, false),
('stream_begin', 'select pgqueue.stream_begin(''grants'', ''read'', 1, 1, ''00000000-0000-0000-0000-000000000001'')', false, true, false),
('stream_read', 'select pgqueue.stream_read(''grants'', ''read'', 1, 1, ''00000000-0000-0000-0000-000000000001'')', false, true, false),
('stream_extend', 'select pgqueue.stream_extend(''grants'', ''given'', 1)', false, true, false),
('stream_ack', 'select pgqueue.stream_ack(''grants'', ''given'', 1, 1, ''00000000-0000-0000-0000-000000000001'')', false, true, false),
('stream_skip', 'select pgqueue.stream_skip(''grants'', ''read'', 1, epoch => 1)', false, true, true),
('list_streams', 'select pgqueue.list_streams(''grants'')', false, true, true),
('drop_stream', 'select pgqueue.drop_stream(''grants'', ''spare'')', false, false, true),
('browse', 'select pgqueue.browse(''grants'')', false, true, true),
('browse_dead_messages', 'select pgqueue.browse_dead_messages(''grants'')', false, null, true),
('browse_archived_messages', 'select pgqueue.browse_archived_messages(''grants'')', false, true, true),
('maintain_archive', 'select pgqueue.maintain_archive()', false, false, true),
('compact_queue', 'select pgqueue.compact_queue(''grants'')', false, false, true),
('compact_queues', 'select pgqueue.compact_queues()', false, false, true),
('create_queue', 'select pgqueue.create_queue(''grants_new'')', false, false, true),
('alter_queue', 'select pgqueue.alter_queue(''grants'')', false, false, true),
('pause_queue', 'select pgqueue.pause_queue(''grants'')', false, false, true),
('resume_queue', 'select pgqueue.resume_queue(''grants'')', false, false, true),
('redrive', 'select pgqueue.redrive(''grants'')', false, false, true),
('purge_dead_messages', 'select pgqueue.purge_dead_messages(''grants'')', false, false, true),
('purge_expired', 'select pgqueue.purge_expired(''grants'')', false, false, true),
('sweep_queue', 'select pgqueue.sweep_queue(''grants'')', false, true, true),
('doctor', 'select count(*) from pgqueue.doctor()', false, false, true),
('expose_transport', 'select pgqueue.expose_transport(''missing'')', false, false, null),
('expose_subscriptions', 'select pgqueue.expose_subscriptions(''nowhere'')', false, false, null),
('unexpose_subscriptions', 'select pgqueue.unexpose_subscriptions()', false, false, true),
('unexpose_transport', 'select pgqueue.unexpose_transport(''grants'')', false, false, true),
('expose_contract', 'select pgqueue.expose_contract()', false, false, null),
('unexpose_contract', 'select pgqueue.unexpose_contract()', false, false, true),
('advance_transport', 'select pgqueue.advance_transport(''grants'')', false, false, false),
('drop_idle_queues', 'select pgqueue.drop_idle_queues()', false, false, true),
('get_queue', 'select pgqueue.get_queue(''grants'')', true, true, true),
('list_queues', 'select pgqueue.list_queues()', true, true, true),
('peek', 'select pgqueue.peek(''grants'')', true, true, true),
('stats', 'select pgqueue.stats(''grants'')', true, true, true),
('next_due_at', 'select pgqueue.next_due_at(''grants'')', true, true, true),
('channel', 'select pgqueue.channel(''grants'')', true, true, true),
('version', 'select pgqueue.version()', true, true, true),
('wake', 'select pgqueue.wake(''grants'')', true, false, true),
('purge_queue', 'select pgqueue.purge_queue(''grants_new'')', false, false, true),
('drop_queue', 'select pgqueue.drop_queue(''grants_new'')', false, false, true),
('grant_access', 'select pgqueue.grant_access(current_user, ''admin'')', false, false, false),
('revoke_access', 'select pgqueue.revoke_access(''pgqueue_test_producer'', ''producer'')', false, false, false),
('list_access', 'select pgqueue.list_access()', false, false, false);
grant select on verbs to public;
select is((select array_agg(distinct p.proname::text order by p.proname::text) from pg_proc p where p.pronamespace = 'pgqueue'::regnamespace and p.proname !~ '^_'),
    (select array_agg(v.name order by v.name) from verbs v), 'the list contains every public function');

-- The settings of the calling session: every one that a role may change and that is on or off or one of several words,
-- and others that change how values are written or read.
create temp table settings as
select s.name, case s.vartype when 'bool' then case s.setting when 'on' then 'off' else 'on' end
    else (select w from unnest(s.enumvals) with ordinality as e (w, n) where w <> s.setting order by n desc limit 1) end as changed, s.setting
from pg_settings s
where s.context = 'user' and s.vartype in ('bool', 'enum') and s.name !~ '^(transaction_|default_transaction_|trace_|debug_(print|pretty)|exit_on_error|client_min_messages)'
    and (s.vartype = 'bool' or cardinality(s.enumvals) > 1)
union all
select s.name, s.changed, current_setting(s.name, true)
from (values ('datestyle', 'SQL, DMY'), ('timezone', 'Pacific/Kiritimati'), ('extra_float_digits', '-15'), ('search_path', 'pg_temp, public'), ('work_mem', '64kB'),
    ('from_collapse_limit', '1'), ('join_collapse_limit', '1'), ('plpgsql.extra_errors', 'all')) s (name, changed);
create function pg_temp.change_settings() returns void language sql as $$ select count(set_config(s.name, s.changed, true)) from settings s $$;
create function pg_temp.restore_settings() returns void language sql as $$ select count(set_config(s.name, s.setting, true)) from settings s $$;
-- Functions are compiled again, as in a new session.
create function pg_temp.recompile() returns void language plpgsql as $$
declare
    f record;
begin
    for f in select p.oid::regprocedure as signature, p.procost from pg_proc p where p.pronamespace = 'pgqueue'::regnamespace loop
        execute format('alter function %s cost %s', f.signature, f.procost);
    end loop;
end;
$$;
create function pg_temp.outcome(statement text, is_changed boolean) returns text language plpgsql as $$
declare
    n bigint;
begin
    if is_changed then
        perform pg_temp.change_settings();
    end if;
    execute statement;
    get diagnostics n = row_count;
    raise exception using errcode = 'ZZ000', message = n::text;
exception when others then
    return case sqlstate when 'ZZ000' then sqlerrm || ' rows' else sqlstate || ' ' || sqlerrm end;
end;
$$;
create function pg_temp.stored(is_changed boolean) returns jsonb language plpgsql as $$
declare
    found jsonb;
begin
    if is_changed then
        perform pg_temp.change_settings();
    end if;
    perform pgqueue.create_queue('grants_new', visibility_timeout => '2:03:04.5', backoff_base => '1.5 s', backoff_factor => 1.1, archive_for => '1 mon 2 days', dedup_window => '90 s', dedicated => true);
    perform pgqueue.enqueue('grants_new', e'{"n": 1.10, "s": "\\\\"}', '36 h', e'{"a": "\\""}', '40 days 1 s', dedup_key => e'a\\b');
    perform pgqueue.enqueue('grants_new', body => e'\\x005c');
    perform pgqueue.create_schedule('grants_new', 'grants_new', '30 4 1 * *', time_zone => 'Europe/Paris');
    perform pgqueue.nack('grants_new', m.id, m.claim_token, '90 min', error => e'\\''') from pgqueue.claim('grants_new', visibility_timeout => '11:59:59.5') m;
    perform pg_temp.restore_settings();
    select jsonb_build_object(
        'queue', (select to_jsonb(q) - '{name,created_at,updated_at,queue_id}'::text[] from pgqueue.get_queue('grants_new') q),
        'messages', (select jsonb_agg(jsonb_build_array(s.payload, s.body, s.headers, date_trunc('minute', s.due_at - s.enqueued_at), s.expires_at - s.enqueued_at, s.last_error)
            order by s.due_at) from pgqueue.scheduled_messages s where s.queue_name = 'grants_new' and s.enqueued_at < s.due_at),
        'schedule', (select to_jsonb(s) - '{last_message_id}'::text[] from pgqueue.list_schedules('grants_new') s))
    into found;
    raise exception using errcode = 'ZZ000', message = found::text;
exception
    when sqlstate 'ZZ000' then
        return sqlerrm::jsonb;
    when others then
        if not is_changed then
            raise;
        end if;
        return to_jsonb(sqlerrm);
end;
$$;
create temp table outcomes as select v.name, v.statement, pg_temp.outcome(v.statement, false) as outcome from verbs v;
create temp table values_stored as select pg_temp.stored(false) as document;
select pg_temp.recompile();
select is_empty($$ select o.name, o.outcome, pg_temp.outcome(o.statement, true) from outcomes o where pg_temp.outcome(o.statement, true) <> o.outcome $$, 'every verb works the same with changed settings of the session');
select pg_temp.recompile();
select is(pg_temp.stored(true), (select document from values_stored), 'verbs store the same values with changed settings of the session');

set local role pgqueue_test_producer;
select lives_ok(v.statement, 'a producer may ' || v.name) from verbs v where v.producer;
select throws_ok(v.statement, '42501', null, 'a producer may not ' || v.name) from verbs v where not v.producer;
select throws_ok(format('table pgqueue.%I', t), '42501', null, format('a producer may not read %s', t))
from unnest(array['messages', 'messages_shared', 'scheduled_messages', 'dead_messages', 'queues', 'sweep_state', 'requeued_messages', 'streams', 'archived_messages', 'unfiled_messages']) t;
select throws_ok($$ insert into pgqueue.messages (queue_name, payload) values ('grants', '1') $$, '42501', null, 'a producer may not write into the tables');
select unalike((select array_agg(s::text)::text from pgqueue.stats() s), '%secret%', 'stats shows no payload to a producer');

set local role pgqueue_test_consumer;
select lives_ok(v.statement, 'a consumer may ' || v.name) from verbs v where v.consumer;
select throws_ok(v.statement, '42501', null, 'a consumer may not ' || v.name) from verbs v where not v.consumer;
select throws_ok($$ select pgqueue.drop_queue('grants') $$, '42501', null, 'a consumer may not drop a queue');
select throws_ok($$ drop table pgqueue.messages $$, '42501', null, 'a consumer may not drop the table of messages');
select throws_ok($$ select from pgqueue.messages $$, '42501', null, 'a consumer may not read the tables');
select throws_ok($$ delete from pgqueue.messages $$, '42501', null, 'a consumer may not write into the tables');
select throws_ok($$ select setval(c.oid, 1) from pg_class c where c.relnamespace = 'pgqueue'::regnamespace and c.relname ~ '_fresh_from_id$' $$, '42501', null, 'a consumer may not set a register');

set local role pgqueue_test_admin;
select lives_ok(v.statement, 'an admin may ' || v.name) from verbs v where v.admin;
select throws_ok(v.statement, '42501', null, 'an admin may not ' || v.name) from verbs v where not v.admin;
select lives_ok($$ select pgqueue.create_queue('grants_new', dedicated => true) $$, 'an admin may create a dedicated queue');
select lives_ok($$ select pgqueue.drop_queue('grants_new') $$, 'an admin may drop a dedicated queue');
select throws_ok($$ create table pgqueue.mine () $$, '42501', null, 'an admin may not create other objects in the schema');

set local role pgqueue_test_nobody;
select throws_ok(v.statement, '42501', null, 'a role without access may not ' || v.name) from verbs v where v.name in ('version', 'stats', 'enqueue', 'claim', 'drop_queue');
select throws_ok($$ select from pgqueue.queues $$, '42501', null, 'a role without access may not read the names of the queues');
reset role;

-- Raw access grants rights on tables only.
set local role pgqueue_test_raw;
select throws_ok(v.statement, '42501', null, 'a role with raw access may not ' || v.name) from verbs v where v.name in ('enqueue', 'claim', 'drop_queue', 'grant_access');
select lives_ok($$ INSERT INTO pgqueue.messages (queue_name, payload, max_attempts, visible_at)
    SELECT q.name, '{"order_id": 1001}', q.max_attempts, now() + (0 * interval '1 second')
    FROM pgqueue.queues q WHERE q.name = 'grants_dedicated'
    RETURNING id $$, 'a role with raw access may send by plain SQL');
select lives_ok($$ WITH picked AS MATERIALIZED (
        SELECT id FROM pgqueue.messages
        WHERE queue_name = 'grants_dedicated' AND visible_at <= now() AND attempt_count < max_attempts
        ORDER BY id FOR UPDATE SKIP LOCKED LIMIT 10
    )
    UPDATE pgqueue.messages m
    SET visible_at = now() + (60 * interval '1 second'), attempt_count = m.attempt_count + 1, claimed_by = 'worker-1'
    FROM picked p WHERE m.queue_name = 'grants_dedicated' AND m.id = p.id
    RETURNING m.id, m.payload, m.attempt_count, m.enqueued_at $$, 'a role with raw access may claim by plain SQL');
select is((select m.attempt_count from pgqueue.messages m where m.queue_name = 'grants_dedicated' and m.payload = '{"order_id": 1001}'), 1, 'a plain claim returns a message that was sent by a plain insert');
select lives_ok($$ UPDATE pgqueue.messages SET visible_at = now() + (9 * interval '1 second'), last_error = 'it broke' WHERE id = 1 AND claimed_by = 'worker-1' $$, 'a role with raw access may give back a message by plain SQL');
select lives_ok($$ UPDATE pgqueue.messages SET visible_at = now() + (9 * interval '1 second') WHERE id = 1 AND claimed_by = 'worker-1' $$, 'a role with raw access may extend a claim by plain SQL');
select lives_ok($$ DELETE FROM pgqueue.messages WHERE queue_name = 'grants_dedicated' AND claimed_by = 'worker-1' $$, 'a role with raw access may acknowledge by plain SQL');
select is((select count(*) from pgqueue.messages m where m.payload = '{"order_id": 1001}'), 0::bigint, 'a message that was acknowledged by plain SQL does not exist any more');
select lives_ok($$ with done as (delete from pgqueue.messages where queue_name = 'grants' returning *)
    insert into pgqueue.unfiled_messages (id, queue_name, payload, enqueued_at, attempt_count, max_attempts)
    select id, queue_name, payload, enqueued_at, attempt_count, max_attempts from done $$, 'a role with raw access may archive by plain SQL');
select lives_ok($$ select from pgqueue.archived_messages $$, 'a role with raw access may read the archive');
select throws_ok($$ update pgqueue.queues set max_attempts = 1 $$, '42501', null, 'a role with raw access may not change a queue');
select throws_ok($$ delete from pgqueue.queues $$, '42501', null, 'a role with raw access may not delete a queue');
select throws_ok($$ truncate pgqueue.messages $$, '42501', null, 'a role with raw access may not truncate a table');
reset role;

-- A reader may read everything and change nothing.
create role pgqueue_test_reader;
select lives_ok($$ select pgqueue.grant_access('pgqueue_test_reader', 'reader') $$, 'grant_access grants reader access');
create temp table reads as
select unnest(array['browse', 'browse_dead_messages', 'browse_archived_messages', 'list_streams', 'list_schedules', 'get_result', 'get_queue', 'list_queues', 'peek', 'stats', 'next_due_at', 'version']) as name;
grant select on reads to public;
set local role pgqueue_test_reader;
select lives_ok(format('select from pgqueue.%I', t), 'a reader may read ' || t)
from unnest(array['messages', 'scheduled_messages', 'dead_messages', 'archived_messages', 'unfiled_messages', 'queues']) t;
select lives_ok(v.statement, 'a reader may ' || v.name) from verbs v where v.name in (select r.name from reads r);
select throws_ok(v.statement, '42501', null, 'a reader may not ' || v.name) from verbs v where v.name not in (select r.name from reads r);
select throws_ok(format('delete from pgqueue.%I', t), '42501', null, 'a reader may not delete from ' || t)
from unnest(array['messages', 'scheduled_messages', 'dead_messages', 'archived_messages', 'unfiled_messages', 'queues']) t;
select throws_ok($$ select nextval('pgqueue.message_id') $$, '42501', null, 'a reader may not use the sequence of message ids');
reset role;
select lives_ok($$ select pgqueue.grant_access('pgqueue_test_reader', a) from unnest(array['raw', 'admin']) a $$, 'grant_access grants raw and admin access to a reader');
select lives_ok($$ select pgqueue.revoke_access('pgqueue_test_reader', a) from unnest(array['raw', 'admin']) a $$, 'revoke_access revokes raw and admin access from a reader');
set local role pgqueue_test_reader;
select lives_ok($$ select from pgqueue.messages $$, 'a reader whose raw and admin access were revoked may still read');
select throws_ok($$ delete from pgqueue.messages $$, '42501', null, 'a reader whose raw and admin access were revoked may not delete');
reset role;
select lives_ok($$ select pgqueue.grant_access('pgqueue_test_reader', a) from unnest(array['raw', 'admin']) a $$, 'grant_access grants raw and admin access to the reader again');
select lives_ok($$ select pgqueue.revoke_access('pgqueue_test_reader', 'reader') $$, 'revoke_access revokes reader access from a role with raw and admin access');
select lives_ok($$ select pgqueue.revoke_access('pgqueue_test_reader', 'raw') $$, 'revoke_access revokes raw access from a former reader');
set local role pgqueue_test_reader;
select throws_ok($$ select from pgqueue.messages $$, '42501', null, 'a former reader may not read');
reset role;

-- Revoking one access keeps the rights that another access shares with it.
select lives_ok(format('select pgqueue.grant_access(%L, %L)', 'pgqueue_test_both', a), format('grant_access grants %s access to the role with two kinds of access', a)) from unnest(array['producer', 'consumer', 'producer']) a;
set local role pgqueue_test_both;
select lives_ok(v.statement, 'a producer and consumer may ' || v.name) from verbs v where v.name in ('enqueue', 'claim', 'stats');
reset role;
select lives_ok($$ select pgqueue.revoke_access('pgqueue_test_both', 'producer') $$, 'revoke_access revokes producer access from a producer and consumer');
set local role pgqueue_test_both;
select throws_ok(v.statement, '42501', null, 'a former producer may not ' || v.name) from verbs v where v.name in ('enqueue', 'enqueue_batch', 'wake');
select lives_ok(v.statement, 'a consumer whose producer access was revoked may ' || v.name) from verbs v where v.consumer;
reset role;
select lives_ok($$ select pgqueue.revoke_access('pgqueue_test_both', 'consumer') $$, 'revoke_access revokes the last access of a role');
select is(has_schema_privilege('pgqueue_test_both', 'pgqueue', 'usage'), false, 'a role without access has no right on the schema');
select is((select count(*) from pg_proc p where p.pronamespace = 'pgqueue'::regnamespace and has_function_privilege('pgqueue_test_both', p.oid, 'execute')), 0::bigint, 'a role without access may execute no function');
select lives_ok($$ select pgqueue.revoke_access('pgqueue_test_both', 'admin') $$, 'revoke_access of an access that was never granted succeeds');
select lives_ok($$ select pgqueue.revoke_access('pgqueue_test_raw', 'raw') $$, 'revoke_access revokes raw access');
select is((select count(*) from pg_class c where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'p', 'S') and exists (select from aclexplode(c.relacl) a where a.grantee = 'pgqueue_test_raw'::regrole)), 0::bigint,
    'a role whose raw access was revoked has no right on any table or sequence');
select lives_ok($$ select pgqueue.grant_access('pgqueue_test_raw', a) from unnest(array['raw', 'producer']) a $$, 'grant_access grants raw and producer access to one role');
select lives_ok($$ select pgqueue.revoke_access('pgqueue_test_raw', 'producer') $$, 'revoke_access revokes producer access from a role with raw access');
set local role pgqueue_test_raw;
select lives_ok($$ select from pgqueue.messages $$, 'a role whose producer access was revoked may still use its raw access');
reset role;

-- Role names are quoted, whatever they contain.
create role "pgqueue_test ""; drop schema pgqueue cascade; --";
select lives_ok($$ select pgqueue.grant_access('pgqueue_test "; drop schema pgqueue cascade; --', 'admin') $$, 'grant_access accepts a role with any name');
set local role "pgqueue_test ""; drop schema pgqueue cascade; --";
select lives_ok($$ select pgqueue.stats() $$, 'a role with any name may use its access');
reset role;
select lives_ok($$ select pgqueue.revoke_access('pgqueue_test "; drop schema pgqueue cascade; --', 'admin') $$, 'revoke_access accepts a role with any name');
select throws_ok($$ select pgqueue.grant_access('pgqueue_test_nobody; grant all on schema pgqueue to public', 'admin') $$, '42704', null, 'grant_access treats an injection as the name of an unknown role');
select throws_ok($$ select pgqueue.grant_access('public', 'admin') $$, '42704', null, 'grant_access does not grant to PUBLIC');
do $$ declare
    hint text;
begin
    perform pgqueue.grant_access('public', 'admin');
exception when undefined_object then
    get stacked diagnostics hint = pg_exception_hint;
    perform set_config('test.hint', hint, true);
end $$;
select matches(current_setting('test.hint'), 'cannot be granted to PUBLIC', 'the hint explains PUBLIC instead of proposing to create the role');
select throws_ok(format('select pgqueue.revoke_access(%L, %L)', n.nspowner::regrole, a), '22023', null, format('revoke_access refuses to revoke %s access from the owner', a))
from pg_namespace n, unnest(array['producer', 'consumer', 'admin', 'reader', 'raw', 'transport']) a where n.nspname = 'pgqueue';
select throws_ok($$ select pgqueue.grant_access('pgqueue_test_nobody', 'admin; drop schema pgqueue cascade') $$, '22023', null, 'grant_access refuses an injection as the name of an access');
select throws_ok($$ select pgqueue.revoke_access('pgqueue_test_nobody', 'everything') $$, '22023', null, 'revoke_access refuses an unknown access');
select throws_ok($$ select pgqueue.revoke_access('pgqueue_test_nowhere', 'admin') $$, '42704', null, 'revoke_access refuses an unknown role');
select is(has_schema_privilege('pgqueue_test_nobody', 'pgqueue', 'usage'), false, 'refused calls grant nothing');

-- A verb calls no object of its caller's schemas.
select lives_ok($$ create schema pgqueue_test_trap $$, 'a schema with functions that raise an error is created');
create function pgqueue_test_trap.jsonb_typeof(jsonb) returns text language plpgsql as $$ begin raise exception 'trapped' using errcode = 'TRAP0'; end $$;
create function pg_temp.clock_timestamp() returns timestamptz language plpgsql as $$ begin raise exception 'trapped' using errcode = 'TRAP0'; end $$;
create temp table queues (name text);
grant usage on schema pgqueue_test_trap to public;
set local search_path = pgqueue_test_trap, pg_temp, pg_catalog, public;
set local role pgqueue_test_producer;
select lives_ok($$ select pgqueue.enqueue('grants', '1', headers => '{}') $$, 'a verb ignores functions and tables that come earlier in its caller''s search_path');
reset role;

select * from finish();
rollback;
