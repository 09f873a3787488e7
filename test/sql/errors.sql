begin;
-- The lock makes test files wait for each other: this file attaches a table.
lock table pgqueue.messages in access exclusive mode;
select plan(359);

-- Passes if the statement fails with this SQLSTATE, a hint, and a message that names the argument and its value.
create function pg_temp.refuses(statement text, code text, argument text, given text) returns text language plpgsql as $$
declare
    state text;
    message text;
    hint text;
begin
    begin
        execute statement;
    exception when others then
        get stacked diagnostics state = returned_sqlstate, message = message_text, hint = pg_exception_hint;
    end;
    return is(
        format('%s, argument named: %s, value named: %s, hint: %s', state,
            position(argument in message) > 0, position(given in message) > 0, hint ~ '^\w.+\.$'),
        format('%s, argument named: t, value named: t, hint: t', code),
        format('%s raises %s with a hint and a message that names %s and %s', statement, code, argument, given));
end;
$$;

select lives_ok($$ select pgqueue.create_queue('errors') $$, 'a queue is created');

-- Every verb that takes a queue, called with the name of a queue that does not exist.
create temp table verbs (name text, arguments text);
insert into verbs values
('alter_queue', ''), ('drop_queue', ''), ('get_queue', ''), ('pause_queue', ''), ('resume_queue', ''), ('purge_queue', ''),
('enqueue', ', ''1'''), ('enqueue_batch', ', ''{1}'''), ('claim', ''), ('ack', ', 1, gen_random_uuid()'), ('ack_batch', ', ''{1}'', gen_random_uuid()'),
('exchange', ', null, null'), ('nack', ', 1, gen_random_uuid()'), ('reject', ', 1, gen_random_uuid()'), ('extend', ', 1, gen_random_uuid()'),
('extend_batch', ', ''{1}'', gen_random_uuid()'), ('record_failure', ', 1, 1'), ('release', ', ''{1}'', gen_random_uuid()'), ('reschedule', ', 1'),
('ack_claims', ', ''{1}'', array[gen_random_uuid()]'), ('nack_claims', ', ''{1}'', array[gen_random_uuid()]'), ('extend_claims', ', ''{1}'', array[gen_random_uuid()]'), ('release_claims', ', ''{1}'', array[gen_random_uuid()]'),
('receive', ''), ('sink_stage', ', gen_random_uuid(), 0, 0'), ('peek', ''), ('browse', ''), ('browse_dead_messages', ''), ('browse_archived_messages', ''), ('stats', ''), ('redrive', ''), ('purge_dead_messages', ''),
('stream_open', ', ''s'''), ('stream_claim', ', ''s'', 1, 0, null'), ('stream_begin', ', ''s'', 1, 1, gen_random_uuid()'), ('stream_read', ', ''s'', 1, 1, gen_random_uuid()'),
('stream_extend', ', ''s'', 1'), ('stream_ack', ', ''s'', 1, 1, gen_random_uuid()'), ('stream_skip', ', ''s'', 1'), ('list_streams', ''), ('list_subscriptions', ''), ('list_schedules', ''), ('cancel', ', 1'), ('cancel_by_key', ', ''k'''), ('expose_transport', ''), ('unexpose_transport', ''), ('advance_transport', ''), ('drop_stream', ', ''s'''),
('purge_expired', ''), ('create_result', ', 1, gen_random_uuid()'), ('update_result', ', 1, ''running'''), ('purge_results', ''), ('sweep_queue', ''), ('compact_queue', ''), ('wake', ''), ('prepare_wait', ''), ('next_due_at', '');
select pg_temp.refuses(format('select pgqueue.%s(''errors_nowhere''%s)', v.name, v.arguments), 'PQ001', 'queue', '''errors_nowhere''') from verbs v;
select pg_temp.refuses(format('select pgqueue.%s(''''%s)', v.name, v.arguments), 'PQ001', 'queue', '''''') from verbs v;
select pg_temp.refuses(format('select pgqueue.%s(null%s)', v.name, v.arguments), 'PQ001', 'queue', 'null') from verbs v where v.name not in ('stats', 'list_streams', 'list_subscriptions', 'list_schedules');
select is(
    (select array_agg(p.proname::text order by p.proname) from pg_proc p
    where p.pronamespace = 'pgqueue'::regnamespace and p.proname !~ '^_' and p.proargnames[1] = 'queue_name' and p.proname not in ('create_queue', 'channel')),
    (select array_agg(v.name order by v.name) from verbs v), 'the list contains every verb that takes a queue');

select pg_temp.refuses('select pgqueue.create_queue(''errors'')', 'PQ002', 'queue', '''errors''');
select pg_temp.refuses('select pgqueue.create_queue(''errors'', dedicated => true)', 'PQ002', 'queue', '''errors''');
select pg_temp.refuses('select pgqueue.create_queue(null)', '22023', 'queue_name', 'null');
select pg_temp.refuses('select pgqueue.create_queue(''Errors'')', '22023', 'queue_name', '''Errors''');
select pg_temp.refuses('select pgqueue.create_queue(''errors_bad'', ''0 s'')', '22023', 'visibility_timeout', '00:00:00');
select pg_temp.refuses('select pgqueue.create_queue(''errors_bad'', ''12:00:01'')', '22023', 'visibility_timeout', '12:00:01');
select pg_temp.refuses('select pgqueue.create_queue(''errors_bad'', max_attempts => 101)', '22023', 'max_attempts', '101');
select pg_temp.refuses('select pgqueue.create_queue(''errors_bad'', max_payload_bytes => -7)', '22023', 'max_payload_bytes', '-7');
select pg_temp.refuses('select pgqueue.create_queue(''errors_bad'', backoff_base => ''-00:00:07'')', '22023', 'backoff_base', '-00:00:07');
select pg_temp.refuses('select pgqueue.create_queue(''errors_bad'', backoff_factor => 0.5)', '22023', 'backoff_factor', '0.5');
select pg_temp.refuses('select pgqueue.create_queue(''errors_bad'', backoff_max => ''-00:00:07'')', '22023', 'backoff_max', '-00:00:07');
select pg_temp.refuses('select pgqueue.create_queue(''errors_bad'', backoff_jitter => 1.5)', '22023', 'backoff_jitter', '1.5');
select pg_temp.refuses('select pgqueue.create_queue(''errors_bad'', dlq_enabled => null)', '22023', 'dlq_enabled', 'null');
select pg_temp.refuses('select pgqueue.create_queue(''errors_bad'', dedicated => null)', '22023', 'dedicated', 'null');
select pg_temp.refuses('select pgqueue.create_queue(''errors_bad'', dead_letter_expired => null)', '22023', 'dead_letter_expired', 'null');
select pg_temp.refuses('select pgqueue.alter_queue(''errors'', max_attempts => -1)', '22023', 'max_attempts', '-1');

select pg_temp.refuses('select pgqueue.doctor(''-00:00:07'')', '22023', 'peek_delay', '-00:00:07');
select pg_temp.refuses('select pgqueue.doctor(null)', '22023', 'peek_delay', 'null');

select pg_temp.refuses('select pgqueue.enqueue(''errors'', null)', '22023', 'payload', 'null');
select pg_temp.refuses('select pgqueue.enqueue(''errors'', ''7'', body => ''\x00'')', '22023', 'payload', '7');
select pg_temp.refuses('select pgqueue.enqueue(''errors'', to_jsonb(repeat(''x'', 300000)))', 'PQ003', 'payload', '262144');
select pg_temp.refuses('select pgqueue.enqueue(''errors'', body => convert_to(repeat(''x'', 300000), ''UTF8''))', 'PQ003', 'body', '300000');
select pg_temp.refuses('select pgqueue.enqueue(''errors'', ''1'', headers => jsonb_build_object(''h'', repeat(''x'', 70000)))', 'PQ003', 'headers', '65536');
select pg_temp.refuses('select pgqueue.enqueue(''errors'', ''1'', headers => ''[7]'')', '22023', 'headers', '[7]');
select pg_temp.refuses('select pgqueue.enqueue(''errors'', ''1'', ''-00:00:07'')', '22023', 'delay', '-00:00:07');
select pg_temp.refuses('select pgqueue.enqueue(''errors'', ''1'', null)', '22023', 'delay', 'null');
select pg_temp.refuses('select pgqueue.enqueue(''errors'', ''1'', expires_in => ''-00:00:07'')', '22023', 'expires_in', '-00:00:07');
select pg_temp.refuses('select pgqueue.enqueue_batch(''errors'', null)', '22023', 'payloads', 'null');
select pg_temp.refuses('select pgqueue.enqueue_batch(''errors'', array[''1'', null]::jsonb[])', '22023', 'payload', 'null');
select pg_temp.refuses('select pgqueue.enqueue_batch(''errors'', ''{1}'', ''-00:00:07'')', '22023', 'delay', '-00:00:07');
select pg_temp.refuses('select pgqueue.enqueue_batch(''errors'', ''{1}'', delays => ''{-00:00:07}'')', '22023', 'delay', '-00:00:07');
select pg_temp.refuses('select pgqueue.enqueue_batch(''errors'', ''{1,2}'', headers => array[''{}'']::jsonb[])', '22023', 'headers', '1 element');
select pg_temp.refuses('select pgqueue.enqueue_batch(''errors'', ''{1,2}'', message_ids => array[gen_random_uuid()])', '22023', 'message_ids', '1 element');
select pg_temp.refuses('select pgqueue.enqueue_batch(''errors'', ''{1,2}'', bodies => array[''\x00'']::bytea[])', '22023', 'bodies', '1 element');
select pg_temp.refuses('select pgqueue.enqueue_batch(''errors'', ''{1,2}'', delays => ''{1 s}'')', '22023', 'delays', '1 element');

select pg_temp.refuses('select pgqueue.claim(''errors'', 0)', '22023', 'max_messages', '0');
select pg_temp.refuses('select pgqueue.claim(''errors'', null)', '22023', 'max_messages', 'null');
select pg_temp.refuses('select pgqueue.claim(''errors'', 1, ''00:00:00.5'')', '22023', 'visibility_timeout', '00:00:00.5');
select pg_temp.refuses('select pgqueue.receive(''errors'', 0)', '22023', 'max_messages', '0');
select pg_temp.refuses('select pgqueue.exchange(''errors'', ''{}'', null, 0)', '22023', 'max_messages', '0');
select pg_temp.refuses('select pgqueue.exchange(''errors'', ''{1}'', null)', '22023', 'claim_token', 'null');
select pg_temp.refuses('select pgqueue.ack(''errors'', 1, null)', '22023', 'claim_token', 'null');
select pg_temp.refuses('select pgqueue.ack(''errors'', null, gen_random_uuid())', '22023', 'id', 'null');
select pg_temp.refuses('select pgqueue.ack_batch(''errors'', null, gen_random_uuid())', '22023', 'ids', 'null');
select pg_temp.refuses('select pgqueue.ack_batch(''errors'', ''{1}'', null)', '22023', 'claim_token', 'null');
select pg_temp.refuses('select pgqueue.nack(''errors'', 1, null)', '22023', 'claim_token', 'null');
select pg_temp.refuses('select pgqueue.nack(''errors'', 1, gen_random_uuid(), ''-00:00:07'')', '22023', 'delay', '-00:00:07');
select pg_temp.refuses('select pgqueue.reject(''errors'', 1, null)', '22023', 'claim_token', 'null');
select pg_temp.refuses('select pgqueue.extend(''errors'', 1, null)', '22023', 'claim_token', 'null');
select pg_temp.refuses('select pgqueue.extend(''errors'', 1, gen_random_uuid(), ''12:00:01'')', '22023', 'visibility_timeout', '12:00:01');
select pg_temp.refuses('select pgqueue.extend_batch(''errors'', null, gen_random_uuid())', '22023', 'ids', 'null');
select pg_temp.refuses('select pgqueue.extend_batch(''errors'', ''{1}'', null)', '22023', 'claim_token', 'null');
select pg_temp.refuses('select pgqueue.extend_batch(''errors'', ''{1}'', gen_random_uuid(), ''12:00:01'')', '22023', 'visibility_timeout', '12:00:01');
select pg_temp.refuses('select pgqueue.nack(''errors'', 1, gen_random_uuid(), headers => ''[7]'')', '22023', 'headers', '[7]');
select pg_temp.refuses('select pgqueue.reject(''errors'', 1, gen_random_uuid(), headers => ''[7]'')', '22023', 'headers', '[7]');
select pg_temp.refuses('select pgqueue.release(''errors'', null, gen_random_uuid())', '22023', 'ids', 'null');
select pg_temp.refuses('select pgqueue.release(''errors'', ''{1}'', null)', '22023', 'claim_token', 'null');
select pg_temp.refuses(format('select pgqueue.%s(''errors'', %s)', v.name, c.arguments), '22023', c.argument, c.given)
from verbs v, (values
    ('null, ''{}''', 'ids', 'null'), ('array[7, null], array_fill(gen_random_uuid(), array[2])', 'ids', '{7,NULL}'),
    ('''{7}'', null', 'claim_tokens', 'null'), ('''{7}'', ''{}''', 'claim_tokens', '{}'),
    ('''{7}'', array[null::uuid]', 'claim_tokens', '{NULL}'),
    ('''{7}'', ''{00000000-0000-0000-0000-000000000001,00000000-0000-0000-0000-000000000001}''', 'claim_tokens', '-0000-000000000001}')
) as c (arguments, argument, given)
where v.name ~ '_claims$';
select pg_temp.refuses('select pgqueue.nack_claims(''errors'', ''{}'', ''{}'', ''-00:00:07'')', '22023', 'delay', '-00:00:07');
select pg_temp.refuses('select pgqueue.nack_claims(''errors'', ''{}'', ''{}'', headers => ''[7]'')', '22023', 'headers', '[7]');
select pg_temp.refuses('select pgqueue.extend_claims(''errors'', ''{}'', ''{}'', ''12:00:01'')', '22023', 'visibility_timeout', '12:00:01');
select pg_temp.refuses('select pgqueue.record_failure(''errors'', null, 1)', '22023', 'id', 'null');
select pg_temp.refuses('select pgqueue.record_failure(''errors'', 1, null)', '22023', 'attempt_count', 'null');
select pg_temp.refuses('select pgqueue.record_failure(''errors'', 1, -7)', '22023', 'attempt_count', '-7');
select pg_temp.refuses('select pgqueue.record_failure(''errors'', 1, 1, ''-00:00:07'')', '22023', 'delay', '-00:00:07');
select pg_temp.refuses('select pgqueue.record_failure(''errors'', 1, 1, headers => ''[7]'')', '22023', 'headers', '[7]');
select lives_ok($$ select pgqueue.stream_open('errors', 'errors') $$, 'a stream is opened');
create function pg_temp.refuses_of_stream(verb text, arguments text, code text, argument text, given text) returns text language sql
as $$ select pg_temp.refuses(format('select pgqueue.%s(''errors'', ''errors'', %s%s)', verb, (select t.epoch from pgqueue.streams t where t.stream_name = 'errors'), arguments), code, argument, given) $$;
select pg_temp.refuses('select pgqueue.stream_open(''errors'', null)', '22023', 'stream_name', 'null');
select pg_temp.refuses('select pgqueue.stream_open(''errors'', ''A'')', '22023', 'stream_name', '''A''');
select pg_temp.refuses(format('select pgqueue.%s(''errors'', ''none''%s)', v.name, replace(v.arguments, ', ''s''', '')), 'PQ005', 'stream', '''none''') from verbs v where v.name ~ 'stream' and v.name not in ('stream_open', 'list_streams');
select pg_temp.refuses(format('select pgqueue.%s(''errors'', null%s)', v.name, replace(v.arguments, ', ''s''', '')), 'PQ005', 'stream', 'null') from verbs v where v.name ~ 'stream' and v.name not in ('stream_open', 'list_streams');
select pg_temp.refuses(format('select pgqueue.%s(''errors'', ''errors''%s)', v.name, replace(v.arguments, ', ''s''', '')), 'PQ006', 'epoch', 'epoch 1 ') from verbs v where v.name ~ 'stream_(claim|begin|read|extend|ack)';
select pg_temp.refuses(format('select pgqueue.%s(''errors'', ''errors''%s)', v.name, replace(v.arguments, ', ''s'', 1', ', null')), '22023', 'epoch', 'null') from verbs v where v.name ~ 'stream_(claim|begin|read|extend|ack)';
select pg_temp.refuses('select pgqueue.stream_skip(''errors'', ''errors'', 1, epoch => 1)', 'PQ006', 'epoch', 'epoch 1 ');
select pg_temp.refuses('select pgqueue.stream_skip(''errors'', ''errors'', null)', '22023', 'seq', 'null');
select pg_temp.refuses('select pgqueue.stream_skip(''errors'', ''errors'', 7)', 'PQ007', 'batch', '7');
select pg_temp.refuses_of_stream(c.verb, c.arguments, c.code, c.argument, c.given)
from (values
    ('stream_claim', ', null, null', '22023', 'after_seq', 'null'), ('stream_claim', ', -7, null', '22023', 'after_seq', '-7'),
    ('stream_claim', ', 0, null, 0', '22023', 'max_messages', '0'), ('stream_claim', ', 0, null, 100001', '22023', 'max_messages', '100001'),
    ('stream_claim', ', 0, null, null', '22023', 'max_messages', 'null'),
    ('stream_claim', ', 0, null, 1, 0', '22023', 'partitions', '0'), ('stream_claim', ', 0, null, 1, null', '22023', 'partitions', 'null'),
    ('stream_claim', ', 0, null, 1, 1001', '22023', 'partitions', '1001'),
    ('stream_claim', ', 0, null, 1, 1, ''12:00:01''', '22023', 'visibility_timeout', '12:00:01'),
    ('stream_claim', ', 0, null, max_bytes => 0', '22023', 'max_bytes', '0'),
    ('stream_claim', ', 7, gen_random_uuid()', 'PQ007', 'batch', '7'), ('stream_claim', ', 0, gen_random_uuid()', 'PQ007', 'batch', '0'),
    ('stream_begin', ', null, gen_random_uuid()', '22023', 'seq', 'null'), ('stream_begin', ', 1, null', '22023', 'claim_token', 'null'),
    ('stream_begin', ', 1, gen_random_uuid(), -7', '22023', 'max_replays', '-7'),
    ('stream_begin', ', 7, gen_random_uuid()', 'PQ007', 'batch', '7'),
    ('stream_read', ', 0, gen_random_uuid()', '22023', 'seq', '0'), ('stream_read', ', 1, null', '22023', 'claim_token', 'null'), ('stream_read', ', 7, gen_random_uuid()', 'PQ007', 'batch', '7'),
    ('stream_extend', ', ''12:00:01''', '22023', 'visibility_timeout', '12:00:01'),
    ('stream_ack', ', 0, gen_random_uuid()', '22023', 'seq', '0'), ('stream_ack', ', 1, null', '22023', 'claim_token', 'null'), ('stream_ack', ', 7, gen_random_uuid()', 'PQ007', 'batch', '7')
) as c (verb, arguments, code, argument, given);
-- The limit of ten years is exact to the second and the same in every verb.
create function pg_temp.hint(statement text) returns text language plpgsql as $$
declare
    hint text;
begin
    execute statement;
    return null;
exception when invalid_parameter_value or sqlstate 'PQ002' or sqlstate 'PQ006' then
    get stacked diagnostics hint = pg_exception_hint;
    return hint;
end;
$$;
select matches(pg_temp.hint(c.statement), '10 years \(3652.5 days\)', format('the hint for %s names the limit of 10 years', c.statement))
from unnest(array[
    $$ select pgqueue.create_queue('errors_bad', archive_for => '3653 days') $$, $$ select pgqueue.create_queue('errors_bad', expires_after_idle => '3653 days') $$,
    $$ select pgqueue.enqueue('errors', '1', '3653 days') $$, $$ select pgqueue.enqueue('errors', '1', expires_in => '3653 days') $$,
    $$ select pgqueue.enqueue_batch('errors', '{1}', delays => '{3653 days}') $$, $$ select pgqueue.publish('topic', '1', '3653 days') $$,
    $$ select pgqueue.nack('errors', 1, gen_random_uuid(), '3653 days') $$, $$ select pgqueue.sweep_staged('3653 days') $$,
    $$ select pgqueue.sweep_staged(forget_after => '3653 days') $$
]) as c (statement);
select is(pg_temp.hint($$ select pgqueue.create_schedule('errors', 'errors', '@daily', null) $$), 'payload must be a JSON document, such as ''null''.',
    'the hint of create_schedule about its payload names no argument that it does not have');
select matches(pg_temp.hint(c.statement), 'once for each column', format('the hint of %s says that PostgreSQL calls a function in (f()).* once for each column', c.code))
from (values
    ('PQ002', $$ select (pgqueue.create_queue('errors_columns')).* $$), ('PQ006', $$ select pgqueue._raise('stream_fenced', 's', 'q', '1', '2') $$)
) as c (code, statement);
select pg_temp.refuses('select pgqueue.peek(''errors'', 0)', '22023', 'max_records', '0');
select pg_temp.refuses('select pgqueue.browse(''errors'', ''asleep'')', '22023', 'state', '''asleep''');
select pg_temp.refuses('select pgqueue.redrive(''errors'', 0)', '22023', 'max_messages', '0');
select pg_temp.refuses('select pgqueue.purge_expired(''errors'', 0)', '22023', 'batch_size', '0');
select pg_temp.refuses('select pgqueue.prepare_wait(''errors'', ''-00:00:07'')', '22023', 'timeout', '-00:00:07');
-- These compare like 9 seconds, because comparison takes a month as 30 days. Added to a timestamp they leave the
-- calendar.
select pg_temp.refuses(format(c.call, i.span), '22023', c.argument, split_part(i.span, ' ', 1))
from (values ('300000 years -108000000 days 9 s'), ('-4000 years 1440000 days 9 s')) as i (span)
cross join (values
    ('select pgqueue.prepare_wait(''errors'', %L)', 'timeout'),
    ('select pgqueue.claim(''errors'', 1, %L)', 'visibility_timeout'),
    ('select pgqueue.exchange(''errors'', null, null, 1, %L)', 'visibility_timeout'),
    ('select pgqueue.extend(''errors'', 1, gen_random_uuid(), %L)', 'visibility_timeout'),
    ('select pgqueue.extend_batch(''errors'', ''{1}'', gen_random_uuid(), %L)', 'visibility_timeout'),
    ('select pgqueue.nack(''errors'', 1, gen_random_uuid(), %L)', 'delay'),
    ('select pgqueue.record_failure(''errors'', 1, 1, %L)', 'delay'),
    ('select pgqueue.create_queue(''errors_bad'', %L)', 'visibility_timeout'),
    ('select pgqueue.create_queue(''errors_bad'', backoff_base => %L)', 'backoff_base'),
    ('select pgqueue.alter_queue(''errors'', backoff_max => %L)', 'backoff_max')
) as c (call, argument);
select pg_temp.refuses('select pgqueue.prepare_wait(''errors'', ''300000 years'')', '22023', 'timeout', '300000 years');
select pg_temp.refuses('select pgqueue.prepare_wait(''errors'', ''-109574999 days 300000 years'')', '22023', 'timeout', '300000 years');

select pg_temp.refuses('select pgqueue.grant_access(''errors_nobody'', ''producer'')', '42704', 'role', 'errors_nobody');
select pg_temp.refuses('select pgqueue.revoke_access(''errors_nobody'', ''producer'')', '42704', 'role', 'errors_nobody');
select pg_temp.refuses('select pgqueue.grant_access(current_user, ''everything'')', '22023', 'access', '''everything''');
select pg_temp.refuses('select pgqueue.grant_access(null, ''producer'')', '22023', 'role_name', 'null');
select pg_temp.refuses('select pgqueue.grant_access(current_user, null)', '22023', 'access', 'null');

-- PQ004: a table that is to be dropped is in use. No second session exists here, so the error is raised directly.
select throws_ok($$ select pgqueue._raise('queue_busy', 'errors', 'drop_queue') $$, 'PQ004', null, 'a busy queue is refused with PQ004');
select pg_temp.refuses('select pgqueue._raise(''queue_busy'', ''errors'', ''drop_queue'')', 'PQ004', 'drop_queue', '''errors''');
select is((select (s.ready_messages, s.inflight_messages, s.scheduled_messages, s.dead_messages)::text from pgqueue.stats('errors') s), '(0,0,0,0)', 'refused calls leave no message');
select is((select count(*) from pgqueue.list_queues() l where l.name = 'errors_bad'), 0::bigint, 'refused calls create no queue');

select * from finish();
rollback;
