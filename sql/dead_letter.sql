-- What was given up comes back, or goes for good.

create or replace function pgqueue.redrive(
    queue_name text, max_messages int default 1000, ids bigint[] default null
)
returns int
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._find_queue(queue_name);
    redriven int;
begin
    if max_messages is null or max_messages < 1 then
        perform pgqueue._raise_invalid('max_messages', max_messages::text, 'an integer from 1');
    end if;
    with revived as (
        delete from pgqueue.dead_messages d
        where d.queue_name = q.name and d.id = any (array(
            select c.id from pgqueue.dead_messages c
            where c.queue_name = q.name and (redrive.ids is null or c.id = any (redrive.ids))
            order by c.id limit redrive.max_messages for update skip locked))
        returning d.*
    )
    insert into pgqueue.scheduled_messages (
        id, queue_name, due_at, enqueued_at, attempt_count, max_attempts, message_id,
        payload, body, headers, claimed_by, last_error, transport_headers
    )
    select
        r.id, r.queue_name, at, r.enqueued_at, 0, q.max_attempts, r.message_id,
        r.payload, r.body, r.headers, r.claimed_by, r.last_error, r.transport_headers
    from revived r;
    get diagnostics redriven = row_count;
    if redriven > 0 then
        perform pgqueue._schedule_by(q, at);
    end if;
    return redriven;
end;
$$;
comment on function pgqueue.redrive(text, int, bigint[]) is
'Sends up to max_messages dead letters, lowest id first and only those in ids where given, back to their queue, and returns how many. They keep id, payload, headers and last_error, start with no attempts, the queue''s max_attempts and no expiry, and are ready at once. Raises 22023, PQ001.';

create or replace function pgqueue.purge_dead_messages(queue_name text, ids bigint[] default null)
returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    q constant pgqueue.queues := pgqueue._find_queue(queue_name);
    purged bigint;
begin
    delete from pgqueue.dead_messages d
    where d.queue_name = q.name and d.id = any (array(
        select c.id from pgqueue.dead_messages c
        where c.queue_name = q.name
            and (purge_dead_messages.ids is null or c.id = any (purge_dead_messages.ids))
        order by c.id for update));
    get diagnostics purged = row_count;
    return purged;
end;
$$;
comment on function pgqueue.purge_dead_messages(text, bigint[]) is
'Deletes dead letters, all or those in ids, and returns how many. Raises PQ001.';
