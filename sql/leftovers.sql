-- What a restore without rows leaves. A dump of the schema alone has the tables, sequences and views that were created
-- for queues, but not the rows of queues. create_queue uses what is left of a queue, and doctor reports the rest.

-- The relations that belong to no queue. queue_name is the queue for which a dedicated table was created; the other
-- relations of that queue are not listed.
create or replace function pgqueue._leftovers() returns table (relation regclass, kind text, queue_name text)
language sql stable as $$
    with named as (
        select n.name
        from pgqueue.queues q
        cross join lateral (
            select pgqueue._sequence_name(r, q.name) as name
            from unnest(pgqueue._counter_roles() || '{archives}'::text[]) as r
            union all
            select pgqueue._access_view(q.name)
        ) n
    )
    select
        c.oid::regclass, c.relkind::text,
        -- The comment of a dedicated table has the name of its queue.
        case when c.relispartition then
            substring(pg_catalog.obj_description(c.oid, 'pg_class'), '^The messages of queue (.*)[.]$') end
    from pg_catalog.pg_class c
    cross join lateral (select substring(c.relname, '^(?:messages|transports|queue)_([0-9]+)(?![0-9])')::bigint) as w (number)
    where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'S', 'v') and case
        when w.number is not null then
            not exists (select from pgqueue.queues q where q.queue_id = w.number)
            and (c.relispartition or pg_catalog.to_regclass(format('pgqueue.messages_%s', w.number)) is null)
        when c.relname ~ '^(access|archives|enqueued|acknowledged|failed|dead)_[0-9a-f]+$' then
            'pgqueue.' || c.relname not in (select n.name from named n)
            -- The comment of a view of access is a pattern.
            and pg_catalog.obj_description(c.oid, 'pg_class') is null
    end
$$;

-- The repair that doctor suggests. Dedicated tables stay, as there can be messages in them.
create or replace function pgqueue._drop_leftovers() returns void
language plpgsql volatile as $$
declare
    leftover record;
begin
    -- No queue is created meanwhile.
    lock table only pgqueue.queues in share mode;
    for leftover in select l.* from pgqueue._leftovers() l where l.queue_name is null loop
        execute format(
            case leftover.kind
                when 'S' then 'drop sequence %s cascade' when 'v' then 'drop view %s cascade' else 'drop table %s cascade'
            end,
            leftover.relation);
    end loop;
end;
$$;

create or replace function pgqueue._findings_of_leftovers(q pgqueue.queues) returns setof pgqueue.finding
language sql stable as $$
    with leftovers as materialized (
        select l.* from pgqueue._leftovers() l where q.name is null
    )
    (
        select
            'warning', l.queue_name, 'leftovers',
            format('%s is the table of a queue that does not exist: a dump without rows was restored', l.relation),
            format('select pgqueue.create_queue(%L);', l.queue_name)
        from leftovers l
        where l.queue_name is not null
        order by l.queue_name
    )
    union all
    select
        'warning', null, 'leftovers',
        format('%s to no queue, the first is %s: a dump without rows was restored',
            case count(*) when 1 then '1 relation belongs' else count(*) || ' relations belong' end, min(l.relation::text)),
        'select pgqueue._drop_leftovers(); -- first create the queues that are missing, which keep the access of roles'
    from leftovers l
    where l.queue_name is null
    having count(*) > 0
$$;
