begin;
select plan(43);

create temp view functions as
select p.oid, p.oid::regprocedure::text as signature, p.proname, p.prosrc, p.proconfig, p.proacl, p.prosecdef, p.proisstrict, p.provolatile, l.lanname,
    p.proname !~ '^_' as is_public
from pg_proc p join pg_language l on l.oid = p.prolang
where p.pronamespace = 'pgqueue'::regnamespace;
create temp view relations as
select c.oid, c.relname, c.relkind, c.relacl, c.reloptions,
    c.relname ~ '^queue_[0-9]+_(fresh_from_id|sweep_resume_id|next_sweep_at|first_due_at|waiting_until|seq|rate_used_until)$' or c.relname ~ '^((archived_)?messages_[0-9]+|transports_[0-9]+|(archives|enqueued|acknowledged|failed|dead)_[0-9a-f]+)$' as is_dynamic
from pg_class c
where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'p', 'S', 'v', 'm', 'f');

-- Functions.
select is_empty($$ select signature from functions where is_public = (obj_description(oid, 'pg_proc') is null) $$, 'every public function has a comment, and no private one');
select is_empty($$ select signature from functions where obj_description(oid, 'pg_proc') !~ '^.+\.$' $$, 'every comment on a function ends with a period');
select is_empty($$ select signature from functions where proacl is null or exists (select from aclexplode(proacl) a where a.grantee = 0) $$, 'PUBLIC may execute no function');
select is_empty(
    $$ select f.signature from functions f join pg_proc p using (oid)
    where (f.prosecdef or f.lanname = 'plpgsql' and (p.prorettype = 'trigger'::regtype or f.proname in (select split_part(a.object, '.', 2) from pgqueue._access_privileges() a)))
        <> (coalesce(f.proconfig, '{}') @> array['search_path=pg_catalog, pg_temp']) $$,
    'entry points, and they alone, pin their search_path');
select is_empty($$ select signature from functions where is_public and not prosecdef and proname <> 'channel' $$, 'every verb is security definer');
select is_empty($$ select signature from functions f join pg_proc p using (oid) where not f.is_public and f.prosecdef and p.prorettype <> 'trigger'::regtype $$, 'no private function is security definer, except trigger functions, which cannot be called directly');
select is_empty($$ select signature from functions where proisstrict and provolatile <> 'i' $$, 'every strict function is immutable');
select is_empty($$ select proname from functions where is_public group by proname having count(*) > 1 $$, 'no public function is overloaded');
select is_empty($$ select signature from functions where lanname not in ('sql', 'plpgsql') $$, 'every function is written in SQL or PL/pgSQL');
select is_empty($$ select signature from functions where is_public and prosrc ~* '\mexecute\M' and proname not in ('drop_queue', 'grant_access', 'revoke_access', 'advance_transport', 'expose_subscriptions', 'unexpose_subscriptions', 'expose_contract', 'unexpose_contract') $$,
    'no verb builds SQL, except those that drop a queue, grant, revoke, maintain the relations of a transport, and expose the tables');

-- Errors.
select is_empty($$ select signature from functions where prosrc ~* '\mraise\s+(exception|notice|warning|info|log|debug|sqlstate|using)' and proname !~ '^_raise(_|$)' $$, 'only _raise and functions named _raise_* raise');
select results_eq(
    $$ select c.code[1] collate "C", count(*) from functions f cross join lateral regexp_matches(f.prosrc, 'errcode = ''(PQ\d\d\d)''', 'g') as c (code) group by 1 order by 1 $$,
    $$ values ('PQ001' collate "C", 1::bigint), ('PQ002', 1), ('PQ003', 1), ('PQ004', 1), ('PQ005', 1), ('PQ006', 1), ('PQ007', 1), ('PQ008', 1), ('PQ009', 1), ('PQ010', 1), ('PQ011', 1), ('PQ012', 1) $$, 'every code of our own is raised by exactly one function');
select is_empty(
    $$ select c.code[1] from functions f cross join lateral regexp_matches(f.prosrc, 'errcode = ''(\w+)''', 'g') as c (code) group by 1 having count(*) > 1 $$,
    'no other SQLSTATE is raised by two functions');
select is_empty($$ select signature from functions where proname ~ '^_raise(_|$)'
        and not (regexp_count(prosrc, 'raise exception') = all (array[regexp_count(prosrc, 'errcode ='), regexp_count(prosrc, 'message ='), regexp_count(prosrc, 'hint =')])) $$,
    'every error has a code, a message and a hint');
select is_empty(
    $$ select c.code[1] from functions f cross join lateral regexp_matches(obj_description(f.oid, 'pg_proc'), '(PQ\d\d\d)', 'g') as c (code)
    where not exists (select from functions r where r.prosrc like '%errcode = ''' || c.code[1] || '''%') $$, 'every code that a comment names is raised');

-- The API.
select results_eq(
    $$ select f.proname::text collate "C", regexp_replace(pg_get_function_identity_arguments(f.oid), 'pgqueue\.(new_)?queue_of_\w+', 'text'), p.pronargdefaults::int, pg_get_function_result(f.oid)
    from functions f join pg_proc p using (oid) where f.is_public order by f.proname::text collate "C" $$,
    $$ values
    ('ack' collate "C", 'queue_name text, id bigint, claim_token uuid', 0, 'boolean'),
    ('ack_batch', 'queue_name text, ids bigint[], claim_token uuid', 0, 'integer'),
    ('ack_claims', 'queue_name text, ids bigint[], claim_tokens uuid[]', 0, 'SETOF pgqueue.settled_claim'),
    ('advance_transport', 'queue_name text', 0, 'bigint'),
    ('alter_queue', 'queue_name text, visibility_timeout interval, max_attempts integer, dlq_enabled boolean, dead_letter_expired boolean, max_payload_bytes integer, backoff_base interval, backoff_factor double precision, backoff_max interval, backoff_jitter double precision, archive_for interval, expires_after_idle interval, dedup_window interval, group_limit integer, on_dead text, max_in_flight integer, rate_limit integer, rate_period interval, counters boolean, dead_letter_to pgqueue.queue_of_admin, priorities boolean', 20, 'pgqueue.queue'),
    ('alter_schedule', 'name text, cron text, payload jsonb, headers jsonb, time_zone text, paused boolean, catch_up boolean, priority integer, group_key text, caller pgqueue.caller', 9, 'timestamp with time zone'),
    ('browse', 'queue_name text, state text, max_messages integer, after_id bigint', 3, 'SETOF pgqueue.message'),
    ('browse_archived_messages', 'queue_name text, max_messages integer, before_id bigint', 2, 'SETOF pgqueue.archived_message'),
    ('browse_dead_messages', 'queue_name text, max_messages integer, after_id bigint', 2, 'SETOF pgqueue.dead_message'),
    ('cancel', 'queue_name text, id bigint', 0, 'boolean'),
    ('cancel_by_key', 'queue_name text, dedup_key text', 0, 'boolean'),
    ('channel', 'queue_name text', 0, 'text'),
    ('claim', 'queue_name text, max_messages integer, visibility_timeout interval, claimed_by text', 3, 'SETOF pgqueue.message'),
    ('claim_any', 'queue_names text[], max_messages integer, visibility_timeout interval, claimed_by text, caller pgqueue.caller', 4, 'SETOF pgqueue.message'),
    ('compact_queue', 'queue_name text', 0, 'SETOF pgqueue.compaction'),
    ('compact_queues', 'caller pgqueue.caller', 1, 'SETOF pgqueue.compaction'),
    ('create_queue', 'queue_name text, visibility_timeout interval, max_attempts integer, dlq_enabled boolean, dedicated boolean, dead_letter_expired boolean, max_payload_bytes integer, backoff_base interval, backoff_factor double precision, backoff_max interval, backoff_jitter double precision, if_not_exists boolean, archive_for interval, expires_after_idle interval, dedup_window interval, group_limit integer, on_dead text, max_in_flight integer, rate_limit integer, rate_period interval, priorities boolean, counters boolean, dead_letter_to pgqueue.queue_of_admin', 22, 'pgqueue.queue'),
    ('create_result', 'queue_name text, id bigint, message_id uuid, task jsonb, expires_in interval', 2,
        'timestamp with time zone'),
    ('create_schedule', 'name text, queue_name text, cron text, payload jsonb, headers jsonb, time_zone text, paused boolean, catch_up boolean, priority integer, group_key text, if_not_exists boolean', 8, 'timestamp with time zone'),
    ('doctor', 'peek_delay interval, caller pgqueue.caller', 2, 'SETOF pgqueue.finding'),
    ('drop_idle_queues', 'caller pgqueue.caller', 1, 'SETOF text'),
    ('drop_queue', 'queue_name text', 0, 'bigint'),
    ('drop_schedule', 'name text, caller pgqueue.caller', 1, 'boolean'),
    ('drop_stream', 'queue_name text, stream_name text', 0, 'integer'),
    ('enqueue', 'queue_name text, payload jsonb, delay interval, headers jsonb, expires_in interval, message_id uuid, body bytea, dedup_key text, on_duplicate text, group_key text, priority integer', 10, 'bigint'),
    ('enqueue_batch', 'queue_name text, payloads jsonb[], delay interval, headers jsonb[], expires_in interval, message_ids uuid[], bodies bytea[], delays interval[], dedup_keys text[], on_duplicate text, group_keys text[], priorities integer[]', 11, 'SETOF bigint'),
    ('exchange', 'queue_name text, ids bigint[], claim_token uuid, max_messages integer, visibility_timeout interval, claimed_by text', 3, 'SETOF pgqueue.exchanged'),
    ('expose_contract', 'schema_name text, caller pgqueue.caller', 2, 'boolean'),
    ('expose_subscriptions', 'schema_name text, table_name text, caller pgqueue.caller', 3, 'text'),
    ('expose_transport', 'queue_name text, schema_name text, table_name text, body_string boolean, flavor text, caller pgqueue.caller', 5, 'text'),
    ('extend', 'queue_name text, id bigint, claim_token uuid, visibility_timeout interval', 1, 'boolean'),
    ('extend_batch', 'queue_name text, ids bigint[], claim_token uuid, visibility_timeout interval', 1, 'SETOF bigint'),
    ('extend_claims', 'queue_name text, ids bigint[], claim_tokens uuid[], visibility_timeout interval', 1, 'SETOF pgqueue.settled_claim'),
    ('get_queue', 'queue_name text', 0, 'pgqueue.queue'),
    ('get_result', 'message_id uuid, caller pgqueue.caller', 1, 'SETOF pgqueue.result'),
    ('grant_access', 'role_name name, access text, queue_name text', 1, 'void'),
    ('list_access', '', 0, 'SETOF pgqueue.access'),
    ('list_queues', 'caller pgqueue.caller', 1, 'SETOF pgqueue.queue'),
    ('list_schedules', 'queue_name text, caller pgqueue.caller', 2, 'SETOF pgqueue.schedule'),
    ('list_streams', 'queue_name text, caller pgqueue.caller', 2, 'SETOF pgqueue.stream'),
    ('list_subscriptions', 'queue_name text, caller pgqueue.caller', 2, 'SETOF pgqueue.subscription'),
    ('maintain_archive', '', 0, 'SETOF pgqueue.archive_change'),
    ('nack', 'queue_name text, id bigint, claim_token uuid, delay interval, error text, headers jsonb', 3, 'boolean'),
    ('nack_claims', 'queue_name text, ids bigint[], claim_tokens uuid[], delay interval, error text, headers jsonb', 3, 'SETOF pgqueue.settled_claim'),
    ('next_due_at', 'queue_name text', 0, 'timestamp with time zone'),
    ('pause_queue', 'queue_name text', 0, 'boolean'),
    ('peek', 'queue_name text, max_records integer', 1, 'integer'),
    ('prepare_wait', 'queue_name text, timeout interval', 1, 'timestamp with time zone'),
    ('publish', 'topic text, payload jsonb, delay interval, headers jsonb, expires_in interval, message_id uuid, body bytea, base_topics text[], dedup_key text, on_duplicate text, group_key text, priority integer, caller pgqueue.caller', 12, 'integer'),
    ('purge_dead_messages', 'queue_name text, ids bigint[]', 1, 'bigint'),
    ('purge_expired', 'queue_name text, batch_size integer', 1, 'integer'),
    ('purge_queue', 'queue_name text', 0, 'bigint'),
    ('purge_results', 'queue_name text, min_age interval', 1, 'bigint'),
    ('receive', 'queue_name text, max_messages integer', 1, 'SETOF pgqueue.message'),
    ('record_failure', 'queue_name text, id bigint, attempt_count integer, delay interval, error text, headers jsonb', 3, 'boolean'),
    ('redrive', 'queue_name text, max_messages integer, ids bigint[], to_queue pgqueue.queue_of_admin', 3, 'integer'),
    ('reject', 'queue_name text, id bigint, claim_token uuid, error text, headers jsonb, reason text', 3, 'boolean'),
    ('release', 'queue_name text, ids bigint[], claim_token uuid', 0, 'integer'),
    ('release_claims', 'queue_name text, ids bigint[], claim_tokens uuid[]', 0, 'SETOF pgqueue.settled_claim'),
    ('reschedule', 'queue_name text, id bigint, due_at timestamp with time zone', 1, 'boolean'),
    ('resume_queue', 'queue_name text', 0, 'boolean'),
    ('revoke_access', 'role_name name, access text, queue_name text', 1, 'void'),
    ('run_schedule', 'name text, caller pgqueue.caller', 1, 'bigint'),
    ('sink_abort', 'run uuid', 0, 'bigint'),
    ('sink_commit', 'run uuid, tokens uuid[], counts bigint[], app_id text, version bigint, caller pgqueue.caller', 3, 'boolean'),
    ('sink_stage', 'queue_name text, run uuid, partition integer, attempt bigint', 0, 'uuid'),
    ('stats', 'queue_name text, caller pgqueue.caller', 2, 'SETOF pgqueue.queue_stats'),
    ('stream_ack', 'queue_name text, stream_name text, epoch bigint, seq bigint, claim_token uuid', 0, 'integer'),
    ('stream_begin', 'queue_name text, stream_name text, epoch bigint, seq bigint, claim_token uuid, max_replays integer', 1, 'pgqueue.stream_batch'),
    ('stream_claim', 'queue_name text, stream_name text, epoch bigint, after_seq bigint, after_token uuid, max_messages integer, partitions integer, visibility_timeout interval, max_bytes bigint', 4, 'SETOF pgqueue.stream_batch'),
    ('stream_extend', 'queue_name text, stream_name text, epoch bigint, visibility_timeout interval', 1, 'SETOF pgqueue.stream_batch'),
    ('stream_open', 'queue_name text, stream_name text, opened_by text, on_ack text', 2, 'pgqueue.stream'),
    ('stream_read', 'queue_name text, stream_name text, epoch bigint, seq bigint, claim_token uuid, partition integer', 1, 'SETOF pgqueue.message'),
    ('stream_skip', 'queue_name text, stream_name text, seq bigint, ids bigint[], error text, epoch bigint', 3, 'integer'),
    ('subscribe', 'topic text, queue_name text', 0, 'boolean'),
    ('sweep_queue', 'queue_name text, max_messages integer', 1, 'integer'),
    ('sweep_staged', 'older_than interval, forget_after interval, caller pgqueue.caller', 3, 'bigint'),
    ('unexpose_contract', 'schema_name text, caller pgqueue.caller', 2, 'boolean'),
    ('unexpose_subscriptions', 'schema_name text, table_name text, caller pgqueue.caller', 3, 'boolean'),
    ('unexpose_transport', 'queue_name text', 0, 'boolean'),
    ('unsubscribe', 'topic text, queue_name text', 0, 'boolean'),
    ('update_result', 'queue_name text, id bigint, status text, value jsonb, error jsonb, worker text', 3, 'SETOF pgqueue.result'),
    ('version', '', 0, 'text'),
    ('wake', 'queue_name text', 0, 'void') $$, 'the functions have the names, arguments, defaults and results of the contract');

-- Tables.
select is_empty($$ select relname from relations where relkind in ('r', 'p') and obj_description(oid, 'pg_class') is null $$, 'every table has a comment');
select is_empty($$ select relname from relations where exists (select from aclexplode(relacl) a where a.grantee = 0) $$, 'PUBLIC has no right on any table or sequence');
select is_empty($$ select from pg_namespace n, aclexplode(n.nspacl) a where n.nspname = 'pgqueue' and a.grantee = 0 $$, 'PUBLIC has no right on the schema');
select isnt_empty($$ select from pg_namespace n where n.nspname = 'pgqueue' and obj_description(n.oid, 'pg_namespace') is not null $$, 'the schema has a comment');
select is_empty($$ select t.typname from pg_type t join pg_class c on c.oid = t.typrelid and c.relkind = 'c' where t.typnamespace = 'pgqueue'::regnamespace and obj_description(t.oid, 'pg_type') is null $$,
    'every type has a comment');
select columns_are('pgqueue', 'messages', array['id', 'queue_name', 'payload', 'headers', 'enqueued_at', 'visible_at', 'expires_at', 'attempt_count', 'max_attempts',
    'claimed_by', 'claim_token', 'last_error', 'message_id', 'body', 'transport_headers', 'transport_id', 'transport_seq', 'claimed_attempt', 'claimed_at', 'kind'], 'messages has the columns of the contract');
select columns_are('pgqueue', 'scheduled_messages', array['id', 'queue_name', 'payload', 'headers', 'enqueued_at', 'due_at', 'expires_at', 'attempt_count', 'max_attempts',
    'claimed_by', 'last_error', 'message_id', 'body', 'transport_headers'], 'scheduled_messages has the columns of the contract');
select columns_are('pgqueue', 'dead_messages', array['id', 'queue_name', 'payload', 'headers', 'enqueued_at', 'died_at', 'expires_at', 'attempt_count', 'max_attempts',
    'claimed_by', 'last_error', 'message_id', 'body', 'reason', 'transport_headers'], 'dead_messages has the columns of the contract');
select columns_are('pgqueue', t::name, array['id', 'queue_name', 'payload', 'body', 'headers', 'message_id', 'attempt_count', 'max_attempts', 'enqueued_at',
    'claimed_at', 'finished_at', 'expires_at', 'claimed_by', 'last_error'], format('%s has the columns of the contract', t)) from unnest(array['archived_messages', 'unfiled_messages']) t;
select has_column('pgqueue', 'queues', c::name, format('queues has the column %s of the contract', c)) from unnest(array['name', 'visibility_timeout', 'max_attempts', 'dlq_enabled', 'archive_for']) c;

-- A plan that is disabled costs 1e10 more, and such a cost makes PostgreSQL compile it, for seconds.
select is_empty($$ select f.signature from functions f join pg_proc p on p.oid = f.oid
    where (f.is_public and f.proname <> 'channel' or p.prorettype = 'trigger'::regtype or exists (select from unnest(f.proconfig) s where s ~ '^enable_.*=off$'))
        and not coalesce(f.proconfig, '{}') @> '{jit=off}' $$,
    'jit is off in every verb, every trigger function, and every function that disables plans');

select is_empty($$ select f.signature from functions f where f.prosrc like '%pgqueue._matches_key(%' and (f.proname !~ '^_' or f.proname = '_remove_messages')
    and not coalesce(f.proconfig, '{}') @> '{enable_seqscan=off,enable_bitmapscan=off}' $$,
    'verbs that look up messages by id disable sequential and bitmap scans, which compare each message with each id');

select lives_ok($$ lock table pgqueue.messages in access exclusive mode $$, 'the test locks the messages before a table is attached');
select lives_ok($$ select pgqueue.create_queue('house', dedicated => true) $$, 'a dedicated queue is created');
select set_eq(
    $$ select t.relname || ' ' || regexp_replace(pg_get_indexdef(i.indexrelid), '^.* USING ', '') from pg_index i join relations t on t.oid = i.indrelid where t.relname ~ '^messages_(shared|[0-9]+)$' $$,
    $$ select t.relname || ' ' || 'btree (queue_name, id)' from relations t where t.relname ~ '^messages_(shared|[0-9]+)$' $$,
    'the primary key is the only index of the tables of plain and of dedicated queues');
select is_empty($$ select relname, o from relations cross join unnest(array['fillfactor', 'autovacuum_vacuum_threshold', 'autovacuum_vacuum_scale_factor']) o
    where relname ~ '^messages' and relkind = 'r' and not exists (select from unnest(reloptions) s where s like o || '=%') $$, 'every table of messages has the three storage parameters');
select is_empty($$ select relname from relations where relkind = 'r' and relname !~ '^archived_messages_' and not 'vacuum_truncate=false' = any (coalesce(reloptions, '{}')) $$, 'vacuum truncates no table');

-- pg_dump must dump every table and sequence: those of the extension by its configuration, those of a queue because
-- they are not members.
select case
    when exists (select from pg_extension where extname = 'pgqueue') then is_empty(
        $$ select r.relname from relations r where r.relkind in ('r', 'p', 'S') and case
            when r.is_dynamic then exists (select from pg_depend d where d.classid = 'pg_class'::regclass and d.objid = r.oid and d.deptype = 'e')
            else not exists (select from pg_extension e where e.extname = 'pgqueue' and r.oid = any (e.extconfig))
        end $$, 'pg_dump dumps every table and sequence')
    else skip('there is no extension here', 1)
end;

select lives_ok($$ select pgqueue.expose_transport('house') $$, 'a queue is exposed to a transport');
select lives_ok($$ select pgqueue.expose_transport(q.name, flavor => 'sqlserver') from pgqueue.create_queue('house_sqlserver') q $$, 'a second queue is exposed in the flavor sqlserver');

select pgqueue.alter_queue('house', archive_for => '1 day') is not null as archives \gset
select is_empty($$ select c.oid::regclass from pg_class c
    where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'r' and c.relpersistence = 'p' and c.relreplident <> 'f'
        and not exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary) $$,
    'every logged table has a replica identity, so writing to it does not fail under a publication for all tables');

select exists (select from pg_available_extensions where name = 'plpgsql_check') as can_check \gset
\if :can_check
set local client_min_messages = warning;
create extension if not exists plpgsql_check;
select is_empty(
    $$ select f.signature, c.lineno, c.level, c.sqlstate, c.message
    from functions f
    -- plpgsql_check needs a table to check a trigger function.
    left join pg_trigger t on t.tgfoid = f.oid
    cross join lateral plpgsql_check_function_tb(f.oid, coalesce(t.tgrelid, 0), oldtable => t.tgoldtable, fatal_errors => false, extra_warnings => true, security_warnings => true) c
    where f.lanname = 'plpgsql' and (t.oid is not null or f.oid not in (select p.oid from pg_proc p where p.prorettype = 'trigger'::regtype)) $$, 'plpgsql_check finds nothing wrong with any PL/pgSQL function');
\else
select skip('plpgsql_check is not available on this server', 1);
\endif

select * from finish();
rollback;
