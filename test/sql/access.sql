begin;
lock table pgqueue.messages in access exclusive mode;
select plan(274);

-- Roles: for each kind of access one with access to the queue access-own, one to the queues access-p-*, one to all.
create temp table kinds as select unnest(array['producer', 'consumer', 'admin', 'reader', 'transport']) as access;
select pgqueue.create_queue(n, dedicated => true) is not null as made from unnest(array['access-own', 'access-p-own', 'access-foreign']) n;
select pgqueue.enqueue(n, '"secret"') is not null, pgqueue.create_schedule(n, n, '@daily', '"secret"') is not null,
    pgqueue.stream_open(n, 'stream') is not null, pgqueue.subscribe('access.topic', n) from unnest(array['access-own', 'access-p-own', 'access-foreign']) n;
do $$
declare
    k text;
begin
    for k in select access from kinds loop
        execute format('create role pgqueue_test_own_%s', k);
        execute format('create role pgqueue_test_pattern_%s', k);
        execute format('create role pgqueue_test_all_%s', k);
        perform pgqueue.grant_access(format('pgqueue_test_own_%s', k), k, 'access-own');
        perform pgqueue.grant_access(format('pgqueue_test_pattern_%s', k), k, 'access-p-*');
        perform pgqueue.grant_access(format('pgqueue_test_all_%s', k), k);
    end loop;
end;
$$;
create role pgqueue_test_a;
create role pgqueue_test_b;
grant select on kinds to public;

-- The state that a call leaves, and how it ended: the SQLSTATE, or the number of rows. All of it is rolled back.
create function pg_temp.outcome(role_name text, statement text) returns text language plpgsql as $$
declare
    n bigint;
begin
    begin
        execute format('set local role %I', role_name);
        execute statement;
        get diagnostics n = row_count;
        raise exception using errcode = 'ZZ000', message = n::text;
    exception when others then
        return case sqlstate when 'ZZ000' then sqlerrm || ' rows' else sqlstate end;
    end;
end;
$$;

-- Every verb with a queue: a statement whose arguments are null beyond the queue. A refusal is PQ001 or, without the
-- right to execute, 42501; anything else has passed the check.
create temp view verbs as
select p.proname::text as verb, t.typname::text as domain, m.accesses as allowed_to,
    format('select pgqueue.%s(%s)', p.proname, string_agg(
        case when a.name in ('queue_name', 'queue_names') then case a.name when 'queue_name' then '%1$L' else 'array[%1$L]' end
            when a.name = 'caller' then 'current_user' else format('null::%s', a.type::regtype) end, ', ' order by a.n)) as statement
from pg_proc p
join pgqueue._access_privileges() m on m.object = 'function pgqueue.' || p.proname
cross join lateral unnest(p.proargnames::text[], p.proargtypes::oid[]) with ordinality as a (name, type, n)
left join lateral (select y.typname from pg_type y where p.proargtypes::oid[] @> array[y.oid] and y.typname ~ 'queue_of') t on true
where p.pronamespace = 'pgqueue'::regnamespace and p.proargnames::text[] && '{queue_name,queue_names}' and p.proname <> 'channel' and p.proname !~ '^_'
    and p.pronargs >= 1
group by 1, 2, 3, p.oid, p.proname;
create temp table expected as
select v.verb, r.scope, k.access, q.name,
    r.role_name,
    case when r.scope = 'all' and k.access = any (v.allowed_to) then 'may'
        when k.access <> all (v.allowed_to) then '42501'
        when r.scope = 'own' and q.name = 'access-own' or r.scope = 'pattern' and q.name like 'access-p-%' then 'may'
        when v.verb = 'create_queue' then '42501'
        else 'PQ001' end as expected,
    pg_temp.outcome(r.role_name, format(v.statement, q.name)) as outcome
from verbs v cross join kinds k
cross join lateral (values ('own', format('pgqueue_test_own_%s', k.access)), ('pattern', format('pgqueue_test_pattern_%s', k.access)), ('all', format('pgqueue_test_all_%s', k.access))) r (scope, role_name)
cross join (values ('access-own'), ('access-p-own'), ('access-foreign')) q (name);
-- raw is access to all queues only.
create role pgqueue_test_all_raw;
select pgqueue.grant_access('pgqueue_test_all_raw', 'raw');
insert into expected
select v.verb, 'all', 'raw', q.name, 'pgqueue_test_all_raw', case when 'raw' = any (v.allowed_to) then 'may' else '42501' end,
    pg_temp.outcome('pgqueue_test_all_raw', format(v.statement, q.name))
from verbs v cross join (values ('access-own'), ('access-foreign')) q (name);
select is_empty($$ select * from expected where expected <> 'may' and outcome <> expected $$, 'a verb is refused for a queue to which the role has no access of its kind');
-- compact_queue is refused in a transaction, and a call without arguments beyond the queue may be invalid.
select is_empty($$ select * from expected where expected = 'may' and outcome in ('42501', 'PQ001') $$, 'a verb passes for a queue to which the role has access of its kind');
select cmp_ok((select count(*) from expected where expected = 'PQ001'), '>', 300::bigint, 'the matrix contains every verb with a queue');

-- Advisory locks. Every role can take those of any queue, unless PUBLIC may not execute the functions with one key.
create function pg_temp.allow_locks(change text) returns void language plpgsql as $$
declare
    f regprocedure;
begin
    for f in
        select p.oid from pg_proc p
        where p.pronamespace = 'pg_catalog'::regnamespace and p.proname ~ '^pg_(try_)?advisory_(xact_)?lock' and p.pronargs = 1
    loop
        execute format(change, f);
    end loop;
end;
$$;
select pg_temp.allow_locks('revoke execute on function %s from public');
select is(pg_temp.outcome('pgqueue_test_own_consumer', 'select pg_advisory_xact_lock_shared(1)'), '42501', 'a superuser can keep roles from advisory locks');
select is_empty($$ select e.verb, e.access, e.outcome from expected e join verbs v using (verb) where e.scope = 'own' and e.name = 'access-own' and e.expected = 'may'
    and pg_temp.outcome(e.role_name, format(v.statement, e.name)) <> e.outcome $$, 'verbs work for roles that may not take advisory locks');
select pg_temp.allow_locks('grant execute on function %s to public');

-- The domain of a verb is that of its row in the matrix.
select is_empty(
    $$ select v.verb, v.domain, v.allowed_to, c.definition from verbs v
    cross join lateral (select pg_get_constraintdef(c.oid) as definition from pg_constraint c join pg_type t on t.oid = c.contypid
        where t.typname = v.domain and t.typnamespace = 'pgqueue'::regnamespace) c
    where position(format('''%s''', pgqueue._privileges_of(v.allowed_to)) in c.definition) = 0 $$,
    'the domain of each verb checks the kinds of access that the matrix names');
select is((select array_agg(v.verb order by v.verb) from verbs v where v.domain is null), array['claim_any'], 'every other verb takes the name of a queue as a domain');

-- Null stands for all queues, of which a role sees its own.
create function pg_temp.seen(role_name text, statement text) returns text[] language plpgsql as $$
declare
    names text[];
begin
    execute format('set local role %I', role_name);
    execute format('select array_agg(distinct n::text order by n::text) from (%s) as t (n) where n ~ ''^access-''', statement) into names;
    reset role;
    return names;
end;
$$;
create temp table several (statement text, allowed_to text[]);
insert into several values
('select s.queue_name from pgqueue.stats() s', '{producer,consumer,admin,reader}'),
('select s.name from pgqueue.list_queues() s', '{producer,consumer,admin,reader}'),
('select s.queue_name from pgqueue.list_schedules() s', '{consumer,admin,reader}'),
('select s.queue_name from pgqueue.list_streams() s', '{consumer,admin,reader}'),
('select s.queue_name from pgqueue.list_subscriptions() s', '{consumer,admin}'),
('select s.queue_name from pgqueue.doctor() s', '{admin}');
create temp table result_ids as select n as name, gen_random_uuid() as id from unnest(array['access-own', 'access-p-own', 'access-foreign']) n;
grant select on result_ids to public;
select count(pgqueue.create_result(r.name, 1000000, r.id) is null) as made from result_ids r \gset
insert into several values ('select s.queue_name from result_ids r, pgqueue.get_result(r.id) s', '{producer,consumer,admin,reader}');
select pgqueue.pause_queue(n) from unnest(array['access-own', 'access-p-own', 'access-foreign']) n;
select is(pg_temp.seen(format('pgqueue_test_%s_%s', w.scope, a), s.statement), w.names, format('%s %s: %s', w.scope, a, s.statement))
from several s cross join unnest(s.allowed_to) a
cross join (values ('own', '{access-own}'::text[]), ('pattern', '{access-p-own}'), ('all', '{access-foreign,access-own,access-p-own}')) w (scope, names);
select is(pg_temp.outcome('pgqueue_test_own_admin', 'select from pgqueue.doctor() where queue_name is distinct from ''access-own'''), '0 rows', 'doctor shows nothing else to an admin of one queue');

select pgqueue.create_queue(n, expires_after_idle => '1 s') is not null as made from unnest(array['access-idle', 'access-p-idle']) n;
update pgqueue.queues set created_at = created_at - interval '1 day', updated_at = updated_at - interval '1 day' where expires_after_idle is not null;
select count(setval(q.next_sweep_at, pgqueue._to_micros(now() - interval '1 day'))) as unused from pgqueue.queues q where q.expires_after_idle is not null \gset
select is(pg_temp.outcome(format('pgqueue_test_%s_admin', scope), 'select from pgqueue.drop_idle_queues()'), n || ' rows', scope || ' admin: drop_idle_queues drops the idle queues of which the caller is an admin')
from (values ('own', 0), ('pattern', 1), ('all', 2)) v (scope, n);
select count(pgqueue.drop_queue(n)) as removed from unnest(array['access-idle', 'access-p-idle']) n \gset

set local role pgqueue_test_own_producer;
select is(pgqueue.publish('access.topic', '1'), 1, 'publish sends to the queues to which the caller may send');
select is(pgqueue.run_schedule('access-own') > 0, true, 'a producer of a queue may run its schedules');
select throws_ok($$ select pgqueue.run_schedule('access-foreign') $$, 'PQ011', 'schedule ''access-foreign'' does not exist', 'a schedule of a foreign queue does not exist');
set local role pgqueue_test_own_admin;
select throws_ok($$ select pgqueue.alter_schedule('access-foreign') $$, 'PQ011', 'schedule ''access-foreign'' does not exist', 'an admin of another queue may not alter a schedule');
select is(pgqueue.drop_schedule('access-foreign'), false, 'an admin of another queue does not drop a schedule');
select throws_ok(format('select pgqueue.%s()', v), '42501', null, v || ' needs admin access to all queues')
from unnest(array['expose_contract', 'unexpose_contract', 'expose_subscriptions', 'unexpose_subscriptions', 'compact_queues', 'sweep_staged']) v;
select throws_ok($$ select pgqueue.create_queue('access-own-2') $$, '42501', 'role pgqueue_test_own_admin may not create queue "access-own-2"', 'an admin of one queue may not create another');
select throws_ok($$ select pgqueue.create_queue('access-foreign') $$, '42501', 'role pgqueue_test_own_admin may not create queue "access-foreign"', 'the error of create_queue does not tell whether the queue exists');
set local role pgqueue_test_pattern_admin;
select lives_ok($$ select pgqueue.create_queue('access-p-new') $$, 'an admin of a pattern may create a queue that matches');
select throws_ok(format('select pgqueue.create_queue(%L)', n), '42501', null, n || ' does not match') from unnest(array['access-q', 'access-', 'access-pnew', 'other-access-p-']) n;
select is(pgqueue.drop_queue('access-p-new'), 0::bigint, 'an admin of a pattern may drop a queue that matches');
reset role;

-- sink_commit checks the queues when it sends.
set local role pgqueue_test_own_producer;
select set_config('test.token', pgqueue.sink_stage('access-own', '00000000-0000-0000-0000-00000000000a', 0, 0)::text, true) is not null as staged;
select lives_ok($$ select pgqueue.sink_commit('00000000-0000-0000-0000-00000000000a', array[current_setting('test.token')::uuid], '{0}') $$, 'a producer of a queue commits what it staged');
select set_config('test.token', pgqueue.sink_stage('access-own', '00000000-0000-0000-0000-00000000000b', 0, 0)::text, true) is not null as staged;
insert into pgqueue.staged_messages (token, row_number, payloads) values (current_setting('test.token')::uuid, 1, '{1}');
set local role pgqueue_test_pattern_producer;
select throws_ok($$ select pgqueue.sink_commit('00000000-0000-0000-0000-00000000000b', array[current_setting('test.token')::uuid], '{0}') $$, 'PQ001', null, 'a role without access to the queue does not commit what another has staged in the same session');
reset role;
-- What was staged belongs to the role that logged in.
create role pgqueue_test_login;
grant pgqueue_test_own_producer to pgqueue_test_login;
set local session authorization pgqueue_test_login;
set local role pgqueue_test_own_producer;
select is(pgqueue.sink_abort('00000000-0000-0000-0000-00000000000b'), 0::bigint, 'set role to a role discards nothing that another session has staged as that role');
reset role;
reset session authorization;
select is(pgqueue.sink_abort('00000000-0000-0000-0000-00000000000b'), 1::bigint, 'the role that logged in discards what it staged, whatever its current role was');

-- No tables: of all relations, but for the views that carry the rights, a producer fills staged_messages by COPY, and a
-- reader of all queues reads those that are named here.
select is(
    array(
        select distinct r.scope || ' ' || k.access || ' ' || p.privilege || ' ' || c.relname
        from kinds k cross join (values ('own'), ('pattern'), ('all')) r (scope)
        cross join unnest(array['select', 'insert', 'update', 'delete', 'truncate', 'references', 'trigger']) p (privilege)
        join pg_class c on c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'p', 'v', 'm', 'f') and c.relname !~ '^access_'
        where has_table_privilege(format('pgqueue_test_%s_%s', r.scope, k.access), c.oid, p.privilege)
        order by 1),
    array(
        select t from unnest(array[
            'own producer insert staged_messages', 'pattern producer insert staged_messages', 'all producer insert staged_messages']
            || array(select 'all reader select ' || n from unnest(array['messages', 'archived_messages', 'unfiled_messages', 'scheduled_messages', 'dead_messages', 'queues']) n)) t
        order by 1),
    'access to queues is access to no table but these');
-- No tables, tried.
select is(pg_temp.outcome(format('pgqueue_test_own_%s', access), format('select from pgqueue.%I', t)), '42501', format('%s of one queue does not read %s', access, t))
from kinds cross join unnest(array['messages', 'messages_shared', 'scheduled_messages', 'dead_messages', 'archived_messages', 'unfiled_messages', 'queues', 'streams', 'subscriptions', 'schedules', 'transports', 'sweep_state', 'staged_messages']) t;
select throws_ok($$ select pgqueue.grant_access('pgqueue_test_a', 'raw', 'access-own') $$, '22023', null, 'raw access to one queue is refused');

-- A foreign queue and a missing one cannot be told apart, in any field of the error.
create function pg_temp.error(statement text) returns text language plpgsql as $$
declare
    m text; d text; h text; c text; e text; s text; t text; u text;
begin
    execute statement;
    return 'no error';
exception when others then
    get stacked diagnostics m = message_text, d = pg_exception_detail, h = pg_exception_hint, c = pg_exception_context, e = returned_sqlstate,
        s = schema_name, t = table_name, u = constraint_name;
    return concat_ws('|', e, m, d, h, c, s, t, u);
end;
$$;
grant select on verbs to public;
select is_empty($$ select v.verb, k.access from verbs v join kinds k on k.access = any (v.allowed_to)
    where pg_temp.error(format('set local role pgqueue_test_own_%s; ', k.access) || format(v.statement, 'access-foreign'))
        <> replace(pg_temp.error(format('set local role pgqueue_test_own_%s; ', k.access) || format(v.statement, 'access-missing')), 'access-missing', 'access-foreign') $$,
    'a foreign queue and a missing queue raise the same error');
reset role;
set local role pgqueue_test_own_producer;
select is(pg_temp.error($$ select pgqueue.enqueue('access-foreign', '1') $$), replace(pg_temp.error($$ select pgqueue.enqueue('access-missing', '1') $$), 'missing', 'foreign'), 'a foreign queue and a missing queue raise the same error for enqueue');
select matches(pg_temp.error($$ select pgqueue.enqueue('access-foreign', '1') $$), 'PQ001\|queue ''access-foreign'' does not exist\|\|Create it with pgqueue.create_queue, or see pgqueue.list_queues\(\)', 'the error is that of a queue that does not exist');
reset role;
select is((select pg_temp.error($$ select pgqueue.enqueue('access-missing', '1') $$)) ~ '^PQ001\|queue ''access-missing'' does not exist\|\|Create it with pgqueue.create_queue, or see pgqueue.list_queues\(\)', true, 'with all rights the error has the same text');

-- A role that may call claim, but not for this queue.
create role pgqueue_test_part;
select pgqueue.grant_access('pgqueue_test_part', 'producer', 'access-own'), pgqueue.grant_access('pgqueue_test_part', 'consumer', 'access-foreign');
set local role pgqueue_test_part;
select matches(pg_temp.error($$ select pgqueue.claim('access-own') $$), 'If it exists, role pgqueue_test_part lacks the access consumer to it: select pgqueue.grant_access\(''pgqueue_test_part'', ''consumer'', ''access-own''\)\.', 'the hint names the access that a role lacks, and the grant');
select matches(pg_temp.error($$ select pgqueue.claim_any('{access-own}') $$), 'lacks the access consumer to it', 'the hint of claim_any names the access, too');
reset role;

-- Who calls: the role of set role, the owner of a security definer function, members that inherit.
select pgqueue.grant_access('pgqueue_test_a', 'consumer', 'access-own'), pgqueue.grant_access('pgqueue_test_b', 'consumer', 'access-foreign');
create schema pgqueue_test_s;
-- Recent minor versions of PostgreSQL demand USAGE on the types in a view of the role that creates it.
create view pgqueue_test_s.view_of_a as select m.payload from pgqueue.browse('access-own') m;
create view pgqueue_test_s.any_of_a as select m.payload from pgqueue.claim_any('{access-own}') m;
grant select on pgqueue_test_s.view_of_a, pgqueue_test_s.any_of_a to public;
grant usage, create on schema pgqueue_test_s to pgqueue_test_a, pgqueue_test_b;
set local role pgqueue_test_a;
create function pgqueue_test_s.by_a(queue text) returns bigint language sql security definer as $$ select count(*) from pgqueue.browse(queue) $$;
create function pgqueue_test_s.seen_by_a() returns text language sql security definer as $$ select string_agg(q.name, ',') from pgqueue.list_queues() q $$;
create function pgqueue_test_s.portal_of_a() returns refcursor language plpgsql security definer as $$
declare c refcursor := 'portal_of_a'; begin open c for select pgqueue.browse('access-own'); return c; end $$;
create function pgqueue_test_s.sets_role() returns bigint language plpgsql as $$ begin set local role pgqueue_test_b; return (select count(*) from pgqueue.browse('access-own')); end $$;
select is(pgqueue_test_s.by_a('access-own'), 3::bigint, 'a definer function has the access of its owner');
set local role pgqueue_test_b;
select is(pgqueue_test_s.by_a('access-own'), 3::bigint, 'another role that calls the definer function uses the access of the owner');
select throws_ok($$ select pgqueue_test_s.by_a('access-foreign') $$, 'PQ001', null, 'the access of the caller does not count inside the definer function');
select is(pgqueue_test_s.seen_by_a(), 'access-own', 'a verb over several queues shows those of the owner of the definer function');
select throws_ok($$ select pgqueue.browse('access-own') $$, 'PQ001', null, 'after the definer function the access is that of the role again');
select throws_ok($$ table pgqueue_test_s.view_of_a $$, 'PQ001', null, 'a view calls a verb with the access of the role that reads it');
select throws_ok($$ table pgqueue_test_s.any_of_a $$, 'PQ001', null, 'a view with a literal array of names is checked for the role that reads it');
select throws_ok($$ select pgqueue.list_queues('pgqueue_test_a') $$, '23514', null, 'a role cannot pass for another');
select throws_ok($$ select pgqueue.stats(null, null) $$, '23514', null, 'a null for the caller is refused');
reset role;
set local role pgqueue_test_a;
select throws_ok($$ select pgqueue_test_s.sets_role() $$, 'PQ001', null, 'set role inside a function changes the access');
reset role;

-- Prepared statements and cursors across set role.
prepare browse_own as select count(*) from pgqueue.browse('access-own');
prepare browse_any(text) as select count(*) from pgqueue.browse($1);
prepare claims_any as select count(*) from pgqueue.claim_any('{access-own}');
prepare lists as select count(*) from pgqueue.list_queues();
set local role pgqueue_test_a;
select set_eq('execute browse_own', '{3}'::bigint[], 'a prepared statement runs with the access of the role');
select set_eq('execute lists', '{1}'::bigint[], 'a prepared statement lists the queues of the role');
set local role pgqueue_test_b;
select throws_ok('execute browse_own', 'PQ001', null, 'a prepared statement is checked again after set role');
select throws_ok('execute browse_any(''access-own'')', 'PQ001', null, 'a prepared statement with a parameter is checked again');
select throws_ok('execute claims_any', 'PQ001', null, 'a prepared statement with a literal array is checked again');
set local role pgqueue_test_a;
declare c cursor for select pgqueue.browse('access-own');
set local role pgqueue_test_b;
select throws_ok('fetch c', 'PQ001', null, 'a cursor that was not started reads with the access of the role that fetches');
select pgqueue_test_s.portal_of_a() is not null as opened;
select throws_ok('fetch portal_of_a', 'PQ001', null, 'a cursor that a definer function opened reads with the access of the role that fetches');
reset role;

-- The values of the domains cannot be stored, made by a cast of the caller's own, or checked by its own operators.
set local role pgqueue_test_a;
select throws_ok($$ create temp table kept as select 'access-own'::pgqueue.queue_of_consumer as q $$, '42501', null, 'no role can keep a checked name in a table');
select throws_ok($$ create temp view kept as select 'access-own'::pgqueue.queue_of_consumer as q $$, '42501', null, 'no role can keep a checked name in a view');
select throws_ok($$ create type pgqueue_test_s.kept as (q pgqueue.queue_of_consumer) $$, '42501', null, 'no role can make a type with a checked name');
select throws_ok($$ create function pgqueue_test_s.kept() returns pgqueue.queue_of_consumer language sql as 'select ''access-foreign''' $$, '42501', null, 'no role can make a function that returns a checked name');
select throws_ok($$ create domain pgqueue_test_s.kept as pgqueue.queue_of_consumer $$, '42501', null, 'no role can make a domain over that of a checked name');
select throws_ok($$ create temp table kept (q pgqueue.caller) $$, '42501', null, 'no role can keep the caller in a table');
select throws_ok($$ select ('access-foreign'::text)::pgqueue.queue_of_consumer $$, 'PQ001', null, 'a cast is checked');
select throws_ok($$ select pgqueue.browse('access-foreign'::pgqueue.queue_of_admin) $$, 'PQ001', null, 'a cast to another domain is checked');
-- Casts and domains of the caller's own run with its rights, before the check and once.
create type pgqueue_test_s.guise as enum ('access-own');
create sequence pgqueue_test_s.turns;
create function pgqueue_test_s.is_caller(text) returns boolean language plpgsql as $$
begin
    if current_user <> 'pgqueue_test_a' then
        raise exception 'trapped' using errcode = 'TRAP0';
    end if;
    return true;
end;
$$;
create function pgqueue_test_s.name_of(pgqueue_test_s.guise) returns text language sql volatile as $$ select (array['access-own', 'access-foreign'])[nextval('pgqueue_test_s.turns')] $$;
create function pgqueue_test_s.role_of(pgqueue_test_s.guise) returns name language sql as $$ select name 'pgqueue_test_b' $$;
create function pgqueue_test_s.json_of(pgqueue_test_s.guise) returns jsonb language sql volatile as $$ select '{}'::jsonb where pgqueue_test_s.is_caller('') $$;
create cast (pgqueue_test_s.guise as text) with function pgqueue_test_s.name_of as implicit;
create cast (pgqueue_test_s.guise as name) with function pgqueue_test_s.role_of as implicit;
create cast (pgqueue_test_s.guise as jsonb) with function pgqueue_test_s.json_of as implicit;
create domain pgqueue_test_s.watched as text check (pgqueue_test_s.is_caller(value));
set local client_min_messages = error;
select throws_ok($$ create cast (pgqueue_test_s.guise as pgqueue.queue_of_consumer) with inout as implicit $$, '42501', null, 'no role can make a cast to a checked name');
select is((select count(*) from pgqueue.browse('access-own'::pgqueue_test_s.guise)), 3::bigint, 'a verb takes a name that a cast of its caller returns');
select throws_ok($$ select pgqueue.browse('access-own'::pgqueue_test_s.guise) $$, 'PQ001', null, 'the name that a cast of the caller returns is checked');
select throws_ok($$ select pgqueue.list_queues('access-own'::pgqueue_test_s.guise) $$, '23514', null, 'a role cannot pass for another by a cast of its own');
select lives_ok($$ select pgqueue.nack('access-own'::pgqueue_test_s.watched, 1, gen_random_uuid(), error => 'x'::pgqueue_test_s.watched, headers => 'access-own'::pgqueue_test_s.guise) $$,
    'casts and domains of the caller run with its rights, not with those of the owner of the verb');
create function pgqueue_test_s.same(text, text) returns boolean language sql as 'select true';
create operator pgqueue_test_s.= (leftarg = text, rightarg = text, function = pgqueue_test_s.same);
create function pgqueue_test_s.same(name, name) returns boolean language sql as 'select true';
create operator pgqueue_test_s.= (leftarg = name, rightarg = name, function = pgqueue_test_s.same);
create function pgqueue_test_s.has_table_privilege(regclass, text) returns boolean language sql as 'select true';
create function pgqueue_test_s.has_table_privilege(name, regclass, text) returns boolean language sql as 'select true';
create function pg_temp.has_table_privilege(name, regclass, text) returns boolean language sql as 'select true';
create function pgqueue_test_s.sha256(bytea) returns bytea language sql as $$ select '\x'::bytea $$;
create function pg_temp.trapped(statement text) returns text language plpgsql set search_path = pgqueue_test_s, pg_temp, pg_catalog as $$
begin
    execute statement;
    return 'no error';
exception when others then
    return sqlstate;
end;
$$;
select is(pg_temp.trapped($$ select pgqueue.browse('access-foreign') $$), 'PQ001', 'functions and operators of the caller do not change the check');
select is(pg_temp.trapped($$ select pgqueue.list_queues('pgqueue_test_b') $$), '23514', 'functions and operators of the caller do not change the check of the caller');
reset client_min_messages;
reset role;

-- Members.
create role pgqueue_test_member;
create role pgqueue_test_noinherit noinherit;
grant pgqueue_test_a to pgqueue_test_member, pgqueue_test_noinherit;
select is(pg_temp.outcome('pgqueue_test_member', $$ select pgqueue.peek('access-own') $$), '1 rows', 'a member that inherits has the access of the role');
select is(pg_temp.outcome('pgqueue_test_noinherit', $$ select pgqueue.peek('access-own') $$), '42501', 'a member that does not inherit has not');
create role pgqueue_test_all_data;
grant pg_read_all_data, pg_write_all_data to pgqueue_test_all_data;
select is(pg_temp.outcome('pgqueue_test_all_data', $$ select pgqueue.peek('access-foreign') $$), '42501', 'a member of pg_write_all_data needs the right to execute a function');
select pgqueue.grant_access('pgqueue_test_all_data', 'consumer', 'access-own');
select is(pg_temp.outcome('pgqueue_test_all_data', $$ select pgqueue.peek('access-foreign') $$), '1 rows', 'a member of pg_write_all_data counts as having access to all queues');

-- Granting and revoking.
select throws_ok($$ select pgqueue.grant_access('pgqueue_test_a', 'producer', 'access-missing') $$, 'PQ001', null, 'access to a queue that does not exist is refused');
select throws_ok(format('select pgqueue.grant_access(''pgqueue_test_a'', ''producer'', %L)', w), '22023', null, format('the pattern %s is refused', w))
from unnest(array['*', 'access*', 'a-*b-*', 'A-*', '-' || repeat('x', 128) || '-*', 'a''-*', '_.*']) w;
select set_eq($$ select access || ' ' || coalesce(queue_name, 'all') from pgqueue.list_access() where role_name = 'pgqueue_test_a' $$, array['consumer access-own'], 'list_access shows access to a queue');
select set_eq($$ select access || ' ' || coalesce(queue_name, 'all') from pgqueue.list_access() where role_name ~ '^pgqueue_test_(pattern|all)_admin' $$, array['admin access-p-*', 'admin all'], 'list_access shows patterns and access to all queues');
select lives_ok($$ select pgqueue.grant_access('pgqueue_test_a', 'consumer'), pgqueue.grant_access('pgqueue_test_a', 'reader', 'access-p-*') $$, 'a role gets further access');
select lives_ok($$ select pgqueue.revoke_access('pgqueue_test_a', 'consumer') $$, 'access to all queues is revoked');
select set_eq($$ select access || ' ' || queue_name from pgqueue.list_access() where role_name = 'pgqueue_test_a' $$, array['consumer access-own', 'reader access-p-*'], 'access to one queue stays if that to all is revoked');
select is(pg_temp.outcome('pgqueue_test_a', $$ select pgqueue.browse('access-own') $$), '3 rows', 'the role still uses its queue');
select is(pg_temp.outcome('pgqueue_test_a', $$ select pgqueue.browse('access-foreign') $$), 'PQ001', 'the role uses no other queue');
select is(pg_temp.outcome('pgqueue_test_a', $$ select pgqueue.claim('access-p-own') $$), 'PQ001', 'consumer access to one queue does not allow a claim from another');
select is(pg_temp.outcome('pgqueue_test_a', $$ select pgqueue.browse('access-p-own') $$), '1 rows', 'several kinds of access go together');
select lives_ok($$ select pgqueue.revoke_access('pgqueue_test_a', 'consumer', 'access-own') $$, 'access to a queue is revoked');
select is(pg_temp.outcome('pgqueue_test_a', $$ select pgqueue.claim('access-own') $$), '42501', 'without access of a kind a role may not execute its verbs');
select is(pg_temp.outcome('pgqueue_test_a', $$ select pgqueue.browse('access-own') $$), 'PQ001', 'the role does not use the queue by another kind of access');
select lives_ok($$ select pgqueue.revoke_access('pgqueue_test_a', 'reader', 'access-p-*') $$, 'the last access is revoked');
select is(has_schema_privilege('pgqueue_test_a', 'pgqueue', 'usage') or exists (select from pg_proc p where p.pronamespace = 'pgqueue'::regnamespace and has_function_privilege('pgqueue_test_a', p.oid, 'execute')), false, 'a role without access has no privilege');
select lives_ok($$ alter role pgqueue_test_b rename to pgqueue_test_c $$, 'a role is renamed');
select set_eq($$ select queue_name from pgqueue.list_access() where role_name = 'pgqueue_test_c' $$, array['access-foreign'], 'a renamed role keeps its access');
select throws_ok($$ drop role pgqueue_test_c $$, '2BP01', null, 'a role with access is not dropped');
select lives_ok($$ drop owned by pgqueue_test_c; drop role pgqueue_test_c $$, 'drop owned ends the access of a role');
create role pgqueue_test_b;
select pgqueue.grant_access('pgqueue_test_b', 'consumer', 'access-foreign');
select lives_ok($$ select pgqueue.drop_queue('access-foreign'), pgqueue.create_queue('access-foreign') $$, 'a queue is dropped and created again');
select is_empty($$ select * from pgqueue.list_access() where role_name = 'pgqueue_test_b' $$, 'access to a dropped queue is not access to the next of its name');
select is(has_schema_privilege('pgqueue_test_b', 'pgqueue', 'usage'), false, 'a role whose only queue was dropped has no privilege');
select lives_ok($$ select pgqueue.drop_queue('access-p-own'), pgqueue.create_queue('access-p-own') $$, 'a queue of a pattern is dropped and created again');
select is(pg_temp.outcome('pgqueue_test_pattern_consumer', $$ select pgqueue.claim('access-p-own') $$), '0 rows', 'access by a pattern stays');

-- A role uses the queues that names and patterns give it, and no others.
create function pg_temp.rights(queue_name text) returns text[] language sql as $$
    select array(
        select r || ' ' || v.access
        from unnest('{x,y}'::text[]) as r cross join (values ('consumer', 'claim(%L)'), ('producer', 'enqueue(%L, ''1'')')) v (access, verb)
        where pg_temp.outcome('pgqueue_test_' || r, format('select pgqueue.' || v.verb, queue_name)) ~ 'rows' order by 1)
$$;
create role pgqueue_test_x;
create role pgqueue_test_y;
select pgqueue.create_queue(n) is not null as made from unnest(array['rights-a', 'rights-b-1', 'rights-b-c_d-1', 'rightsx']) n;
select pgqueue.grant_access('pgqueue_test_x', 'consumer', 'rights-b-1');
select is(pg_temp.rights('rights-b-1'), array['x consumer'], 'a name gives rights to its queue');
select pgqueue.grant_access('pgqueue_test_x', 'consumer', 'rights-*'), pgqueue.grant_access('pgqueue_test_x', 'producer', 'rights-b-*'), pgqueue.grant_access('pgqueue_test_y', 'consumer', 'rights-*'),
    pgqueue.grant_access('pgqueue_test_y', 'producer', 'rights-b-c_d-*');
select is(pg_temp.rights('rights-b-1'), array['x consumer', 'x producer', 'y consumer'], 'a name and patterns together give rights to a queue');
select is(pg_temp.rights('rights-a'), array['x consumer', 'y consumer'], 'a pattern gives rights to each queue that it matches');
select is(pg_temp.rights('rights-b-c_d-1'), array['x consumer', 'x producer', 'y consumer', 'y producer'], 'a pattern may be of any depth');
select is(pg_temp.rights('rightsx'), '{}', 'a pattern gives no rights to another queue');
select is(pg_temp.rights('rights-*'), '{}', 'a pattern is no queue');
select pgqueue.create_queue('rights-b-2') is not null as made;
select is(pg_temp.rights('rights-b-2'), array['x consumer', 'x producer', 'y consumer'], 'a new queue gets the rights of its patterns');
select pgqueue.revoke_access('pgqueue_test_x', 'consumer', 'rights-*');
select is(pg_temp.rights('rights-b-1'), array['x consumer', 'x producer', 'y consumer'], 'access to a queue by name stays if that by a pattern is revoked');
select is(pg_temp.rights('rights-b-2'), array['x producer', 'y consumer'], 'access by a revoked pattern ends, and access by another stays');
select pgqueue.revoke_access('pgqueue_test_x', 'consumer', 'rights-b-1'), pgqueue.revoke_access('pgqueue_test_x', 'producer', 'rights-b-*');
select is(pg_temp.rights('rights-b-1'), array['y consumer'], 'revoking a name ends the rights of the role');
alter role pgqueue_test_y rename to "pgqueue_test_Y z";
select is(pg_temp.outcome('pgqueue_test_Y z', $$ select pgqueue.claim('rights-b-2') $$), '0 rows', 'a renamed role keeps the rights of its pattern');
select pgqueue.revoke_access('pgqueue_test_Y z', 'consumer', 'rights-*'), pgqueue.revoke_access('pgqueue_test_Y z', 'producer', 'rights-b-c_d-*');
select is(pg_temp.outcome('pgqueue_test_Y z', $$ select pgqueue.claim('rights-b-2') $$), '42501', 'a renamed role loses its rights with its pattern');
alter default privileges in schema pgqueue grant select on tables to pgqueue_test_x;
select pgqueue.create_queue('rights-c') is not null as made;
select pgqueue.grant_access('pgqueue_test_Y z', 'consumer', 'rights-c');
select is_empty($$ select * from pgqueue.list_access() where role_name = 'pgqueue_test_x' $$, 'default privileges give no access to a new queue');
alter default privileges in schema pgqueue revoke select on tables from pgqueue_test_x;
select throws_ok($$ set local role "pgqueue_test_Y z"; grant update on pgqueue.access_any to pgqueue_test_x $$, '42501', null, 'a role with access grants none');
select throws_ok($$ set local role "pgqueue_test_Y z"; create event trigger pgqueue_test on ddl_command_end execute function pg_catalog.suppress_redundant_updates_trigger() $$, '42501', null, 'a role that is no superuser creates no event trigger');

-- What plans and statistics tell a role about a queue of others.
create function pg_temp.plan(statement text) returns text language plpgsql as $$
declare
    line text;
    lines text := '';
begin
    for line in execute statement loop lines := lines || line; end loop;
    return lines;
exception when others then
    return sqlstate || sqlerrm;
end;
$$;
create temp table of_consumers as select v.verb, v.statement from verbs v where v.verb <> 'create_queue' and 'consumer' = any (v.allowed_to);
grant select on of_consumers to public;
set local role pgqueue_test_own_consumer;
select is_empty($$ select v.verb, how from of_consumers v cross join unnest(array['explain', 'explain (verbose)', 'explain (analyze, verbose, timing off, summary off, buffers off)']) how
    where pg_temp.plan(how || ' ' || format(v.statement, 'access-foreign'))
            <> replace(pg_temp.plan(how || ' ' || format(v.statement, 'access-missing')), 'access-missing', 'access-foreign') $$,
    'explain does not tell a foreign queue from a missing one');
select matches(pg_temp.plan('explain (verbose) select * from pgqueue.browse(''access-foreign'')'), 'Function Scan', 'explain shows a plan of a call that would be refused');
reset role;
analyze pgqueue.queues, pgqueue.messages, pgqueue.schedules;
set local role pgqueue_test_own_consumer;
select is_empty($$ select tablename, attname from pg_stats where schemaname = 'pgqueue' $$, 'a role sees no statistics of the tables');
select is_empty($$ select sequencename from pg_sequences where schemaname = 'pgqueue' and last_value is not null $$, 'a role sees no value of a register or counter');
reset role;
select isnt_empty($$ select attname from pg_stats where schemaname = 'pgqueue' $$, 'there are statistics to be seen');

-- A role with access can make views of all relations in the schema, although it may not read them. They must not keep a
-- foreign queue.
select pgqueue.create_queue('access-kept', archive_for => '1 day') is not null as made, pgqueue.expose_transport('access-kept', 'pgqueue_test_s', 'kept') is not null as exposed;
grant usage, create on schema pgqueue_test_s to pgqueue_test_own_consumer;
create function pg_temp.cling(queue_name text) returns bigint language plpgsql as $$
declare
    relation regclass;
    n bigint := 0;
begin
    for relation in
        select c.oid from pg_class c, pgqueue.queues q
        where q.name = queue_name and c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'S')
            and c.relname ~ format('_(%s|%s)(_|$)', q.queue_id, split_part(pgqueue._sequence_name('archives', q.name), 'archives_', 2))
    loop
        n := n + 1;
        set local role pgqueue_test_own_consumer;
        execute format('create view pgqueue_test_s.clings_%s as select * from %s', n, relation);
        reset role;
    end loop;
    return n;
end;
$$;
set local client_min_messages = warning;
select cmp_ok(pg_temp.cling('access-kept'), '>=', 13::bigint, 'a role makes views of what belongs to a foreign queue');
select lives_ok($$ select pgqueue.unexpose_transport('access-kept') $$, 'the views of a role do not keep the relation of a foreign queue');
select lives_ok($$ select pgqueue.alter_queue('access-kept', archive_for => '0') $$, 'the views of a role do not keep a foreign queue from ending its archive');
select lives_ok($$ select pgqueue.drop_queue('access-kept') $$, 'the views of a role do not keep a foreign queue from being dropped');
reset client_min_messages;

-- What the system catalogs and views show about a queue that leaves its name everywhere. The superuser of this session
-- is another role for pg_stat_activity.
create function pg_temp.shown_in(words text) returns text[] language plpgsql as $$
declare
    shown record;
    is_shown boolean;
    places text[] := '{}';
begin
    perform pg_stat_clear_snapshot();
    for shown in
        select c.relname from pg_class c
        where c.relnamespace = 'pg_catalog'::regnamespace and c.relkind in ('r', 'v') and c.relname !~ '^pg_(timezone|shmem)' order by 1
    loop
        begin
            execute format('select exists (select from pg_catalog.%I w where position($1 in w::text) > 0)', shown.relname) into is_shown using words;
            if is_shown then
                places := places || shown.relname::text;
            end if;
        exception when insufficient_privilege then
            null;
        end;
    end loop;
    return places;
end;
$$;
select pgqueue.create_queue('access-hidden', archive_for => '1 day', dedup_window => '1 min') is not null as made,
    pgqueue.grant_access('pgqueue_test_own_consumer', 'consumer', 'access-hidden'), pgqueue.prepare_wait('access-hidden') is not null as waits,
    pgqueue.enqueue('access-hidden', '"access-hidden"', headers => '{"access-hidden": 1}', dedup_key => 'access-hidden') > 0 as sent,
    pgqueue.create_schedule('access-hidden', 'access-hidden', '@daily', '"access-hidden"') is not null as scheduled,
    pgqueue.subscribe('access-hidden.topic', 'access-hidden') as subscribed, pgqueue.stream_open('access-hidden', 'access-hidden') is not null as opened;
select pgqueue.reject('access-hidden', m.id, m.claim_token, 'access-hidden') from pgqueue.claim('access-hidden', claimed_by => 'access-hidden') m;
analyze pgqueue.queues, pgqueue.dead_messages, pgqueue.schedules, pgqueue.streams, pgqueue.subscriptions;
select ok(pg_temp.shown_in('access-hidden') @> '{pg_stat_activity,pg_stats}', 'a superuser finds the name of the queue in its own statement and in statistics');
set local role pgqueue_test_own_consumer;
select is(pg_temp.shown_in('access-hidden'), '{}', 'no catalog and no view of activity, locks or statistics shows another role the name of a shared queue');
select is(pg_temp.shown_in('access-p-'), '{pg_description}', 'of a pattern with access the catalogs show the comment');
reset role;

-- What was granted past grant_access.
grant usage on schema pgqueue to pgqueue_test_b;
grant execute on function pgqueue.drop_queue to pgqueue_test_b;
grant select on pgqueue.messages to pgqueue_test_b;
grant select on all tables in schema pgqueue to pgqueue_test_x;
grant select on pgqueue.access_any to public;
grant select (payload) on pgqueue.archived_messages to pgqueue_test_b;
grant usage on domain pgqueue.queue_of_admin to pgqueue_test_b;
grant create on schema pgqueue to pgqueue_test_b;
grant execute on function pgqueue.grant_access to pgqueue_test_b;
-- The relation of a transport: the admin that exposed the queue has all privileges, and grants them to endpoints.
grant usage, create on schema pgqueue_test_s to pgqueue_test_pattern_admin;
grant usage on schema pgqueue_test_s to pgqueue_test_pattern_transport;
create role pgqueue_test_sends;
create role pgqueue_test_reads;
set local role pgqueue_test_pattern_admin;
select pgqueue.expose_transport('access-p-own', 'pgqueue_test_s', 'relation') is not null as exposed;
grant select, insert, delete on pgqueue_test_s.relation to pgqueue_test_pattern_transport;
grant insert on pgqueue_test_s.relation to pgqueue_test_own_transport, pgqueue_test_pattern_producer, pgqueue_test_sends;
reset role;
grant select, insert on pgqueue_test_s.relation to pgqueue_test_reads;
select pgqueue.grant_access('pgqueue_test_reads', 'transport', 'access-own');
select ok(bool_or(detail ~ 'access_any'), 'doctor shows access of public') from pgqueue.doctor() where finding = 'unmanaged_grant' and detail ~ 'role public';
select set_eq($$ select access from pgqueue.list_access() where role_name = 'pgqueue_test_x' and queue_name is null $$, array['reader'], 'a grant on all tables in the schema is reader access');
select ok(bool_or(detail ~ 'pgqueue.sweep_state' and detail !~ 'pgqueue.messages,'), 'doctor shows the tables of such a grant that a reader does not need') from pgqueue.doctor() where finding = 'unmanaged_grant' and detail ~ 'pgqueue_test_x';
select set_eq($$ select detail from pgqueue.doctor() where finding = 'unmanaged_grant' and detail ~ 'pgqueue_test_b' $$,
    array['role pgqueue_test_b has privileges that none of its access includes: column payload of table pgqueue.archived_messages, function pgqueue.drop_queue, function pgqueue.grant_access, schema pgqueue, table pgqueue.messages, type pgqueue.queue_of_admin'],
    'doctor shows privileges that were granted by hand');
select is_empty($$ select detail from pgqueue.doctor() where finding = 'unmanaged_grant' and detail ~ 'pgqueue_test_(own|pattern|all)' $$, 'doctor shows nothing that grant_access granted');
select results_eq($$ select detail from pgqueue.doctor() where finding = 'unmanaged_grant' and detail ~ 'relation ' order by 1 $$,
    array['role pgqueue_test_reads has privileges that none of its access includes: relation pgqueue_test_s.relation', 'role pgqueue_test_sends has privileges that none of its access includes: relation pgqueue_test_s.relation'],
    'doctor shows privileges on the relation of a transport that belong to no access');
create function pg_temp.repair() returns void language plpgsql as $$
declare
    f record;
begin
    for f in select d.repair from pgqueue.doctor() d where d.finding = 'unmanaged_grant' loop execute f.repair; end loop;
end;
$$;
select lives_ok('select pg_temp.repair()', 'the repair of the finding runs');
select is_empty($$ select detail from pgqueue.doctor() where finding = 'unmanaged_grant' $$, 'after the repair the finding is gone');
select is(array(select r || ' ' || p from unnest(array['pattern_transport', 'own_transport', 'reads', 'sends']) r cross join unnest(array['insert', 'select']) p
    where has_table_privilege('pgqueue_test_' || r, 'pgqueue_test_s.relation', p) order by 1), array['own_transport insert', 'pattern_transport insert', 'pattern_transport select', 'reads insert'],
    'the repair leaves the privileges of endpoints on the relation of a transport');
select pgqueue.revoke_access('pgqueue_test_pattern_admin', 'admin', 'access-p-*');
select isnt_empty($$ select from pgqueue.doctor() where finding = 'unmanaged_grant' and detail ~ 'pgqueue_test_pattern_admin.*relation ' $$, 'doctor shows that a former admin still has privileges on the relation that it exposed');

select * from finish();
rollback;
