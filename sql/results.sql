-- Results of messages: outcome, value, errors, attempts. The sender creates a result with the message, and a consumer
-- writes the outcome in the transaction of its acknowledgement. Nothing is written when a message dies or is removed:
-- get_result looks for the message.

-- A result that is not finished has failed if its message is gone.
create or replace function pgqueue._as_result(r pgqueue.results) returns pgqueue.result
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
    dead pgqueue.dead_messages;
    attempts int;
    is_gone boolean;
    queue_kind bigint;
begin
    -- By one statement, as a message moves between the tables. One in scheduled_messages waits for its next attempt.
    select
        coalesce(
            (select m.attempt_count from pgqueue.messages_shared m where m.queue_name = r.queue_name and m.id = r.id),
            (select 0 from pgqueue.scheduled_messages s where s.queue_name = r.queue_name and s.id = r.id)),
        -- The snapshot of the caller can be older, and not show that a consumer has settled the message.
        exists (select from pgqueue.results c where c.queue_name = r.queue_name and c.id = r.id and c.finished_at is null),
        (select q.kind from pgqueue.queues q where q.name = r.queue_name)
    into attempts, is_gone, queue_kind;
    if attempts is null and queue_kind is not null then
        select
            coalesce(
                (select m.attempt_count from pgqueue.messages m where m.queue_name = r.queue_name and m.id = r.id),
                (select 0 from pgqueue.scheduled_messages s where s.queue_name = r.queue_name and s.id = r.id)),
            exists (select from pgqueue.results c where c.queue_name = r.queue_name and c.id = r.id and c.finished_at is null)
        into attempts, is_gone;
    end if;
    is_gone := is_gone and r.finished_at is null and attempts is null;
    if is_gone then
        select d.* into dead from pgqueue.dead_messages d where d.queue_name = r.queue_name and d.id = r.id;
    end if;
    return row(
        r.message_id, r.queue_name, r.id,
        -- The worker of the last attempt may have written nothing, and the message has returned.
        case when is_gone then 'failed' when r.status = 'running' and attempts = 0 then 'ready' else r.status end,
        r.task, r.value, r.errors,
        coalesce(dead.reason, case when is_gone then 'removed' end), r.attempt_count, r.workers, r.enqueued_at,
        r.started_at, r.last_attempted_at, coalesce(r.finished_at, dead.died_at), r.expires_at)::pgqueue.result;
end;
$$;

create or replace function pgqueue.create_result(
    queue_name pgqueue.queue_of_producer, id bigint, message_id uuid, task jsonb default null,
    expires_in interval default '14 days'
) returns timestamptz
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
begin
    perform pgqueue._require(id is not null, 'id', null, 'that of a message');
    perform pgqueue._require(message_id is not null, 'message_id', null, 'that of a message');
    perform pgqueue._require(pgqueue._is_interval_between(expires_in, '0', '3652.5 days'),
        'expires_in', expires_in::text, 'an interval from 0 to 10 years (3652.5 days)');
    perform pgqueue._check_content(q, coalesce(task, 'null'), null, null);
    insert into pgqueue.results (queue_name, id, message_id, task, enqueued_at, expires_at, expires_in)
    values (
        q.name, create_result.id, create_result.message_id, create_result.task, at,
        pgqueue._add_interval(at, create_result.expires_in), create_result.expires_in);
    return at;
end;
$$;
comment on function pgqueue.create_result is
'Creates the result of a message, with the status ready, and returns its enqueued_at. Call it in the transaction of
enqueue, with the id that it has returned. message_id, by which get_result finds it, is that of the message, or another
UUID that no result has. task is for the program that reads the result, such as the name of a function and its
arguments; it has at most max_payload_bytes. expires_in, from 0 to 10 years, counts from the end of the message.
Raises 22023, 23505 (the message or message_id has a result), PQ001, PQ003.';

create or replace function pgqueue.update_result(
    queue_name pgqueue.queue_of_consumer, id bigint, status text, value jsonb default null, error jsonb default null,
    worker text default null
) returns setof pgqueue.result
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off
as $$
declare
    at constant timestamptz := pgqueue._now();
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    is_start constant boolean := status = 'running';
    is_end constant boolean := status in ('successful', 'failed');
    bytes bigint;
    changed pgqueue.results;
begin
    if id is null then
        perform pgqueue._raise_invalid('id', null, 'the id of a message');
    elsif status is null or status not in ('ready', 'running', 'successful', 'failed') then
        perform pgqueue._raise_invalid('status', status, 'ready, running, successful or failed');
    elsif value is not null and status <> 'successful' then
        perform pgqueue._raise_invalid('value', left(value::text, 50), 'null unless status is successful');
    elsif error is not null and status not in ('ready', 'failed') then
        perform pgqueue._raise_invalid('error', left(error::text, 50), 'null unless status is ready or failed');
    elsif worker is not null and not is_start then
        perform pgqueue._raise_invalid('worker', left(worker, 50), 'null unless status is running');
    end if;
    perform pgqueue._check_content(q, coalesce(value, 'null'), null, null);
    bytes := octet_length(error::text);
    if bytes > greatest(q.max_payload_bytes, 65536) then
        perform pgqueue._raise(
            'payload_too_large', q.name, 'error', bytes::text, greatest(q.max_payload_bytes, 65536)::text);
    end if;
    if is_start then
        -- An attempt can begin late, when its claim has ended and another one has settled or returned the message. Lock
        -- first: the next statement sees what that one has committed.
        select r.* into changed from pgqueue.results r where r.queue_name = q.name and r.id = update_result.id for update;
        if found and (
            changed.finished_at is not null
            and not exists (select from pgqueue.messages m where m.queue_name = q.name and m.id = update_result.id)
            or exists (select from pgqueue.scheduled_messages s where s.queue_name = q.name and s.id = update_result.id)
        ) then
            return next pgqueue._as_result(changed);
            return;
        end if;
    end if;
    update pgqueue.results r
    set status = update_result.status, value = update_result.value,
        errors = case when error is null then r.errors
            else case when jsonb_array_length(r.errors) < 20 then r.errors else r.errors - 0 end || jsonb_build_array(error) end,
        attempt_count = r.attempt_count + is_start::int,
        workers = case when is_start then (r.workers || coalesce(worker, ''))[greatest(cardinality(r.workers) - 98, 1):]
            else r.workers end,
        started_at = coalesce(r.started_at, case when is_start then at end),
        last_attempted_at = case when is_start then at else r.last_attempted_at end,
        finished_at = case when is_end then at end,
        expires_at = case when is_end then pgqueue._add_interval(at, r.expires_in) else r.expires_at end
    where r.queue_name = q.name and r.id = update_result.id
    returning r.* into changed;
    if found then
        return next pgqueue._as_result(changed);
    end if;
end;
$$;
comment on function pgqueue.update_result is
'Changes the result of a message and returns it; no row if the message has none. running begins an attempt of worker; it
changes nothing while the message is scheduled, and after the end of the result if the message is gone. ready ends an
attempt that failed and is repeated. successful, with the value, and failed end the result. Call it in the transaction
of ack, nack or reject: if one of these returns false, roll back. error is added to errors, which keeps the last 20, as
workers keeps the last 100. value has at most max_payload_bytes, and error, too, or 65536 if that is more. Raises 22023,
PQ001, PQ003.';

create or replace function pgqueue.get_result(message_id uuid, caller pgqueue.caller default current_user)
returns setof pgqueue.result language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off set jit = off as $$
begin
    perform pgqueue._require_untruncated_messages();
    return query
    select l.* from pgqueue.results r cross join lateral pgqueue._as_result(r) l
    where r.message_id = get_result.message_id
        and pgqueue._may_use(caller, r.queue_name, pgqueue._privileges_of('{producer,consumer,admin,reader}'));
end;
$$;
comment on function pgqueue.get_result is
'Returns the result of the message with this message_id; no row if there is none, if it has expired and was removed, or
if the caller may not use the queue. The status failed has a reason if no consumer has set it: that of the dead letter,
or removed if the message was purged, cancelled, acknowledged without an outcome, or has expired. If the dead letter is
sent again by redrive, the status is ready again.';

-- Deletes results that have expired. Those whose message is still there, or can be sent again, get a later time:
-- otherwise each call would look for the messages of all that stay. One that has succeeded was acknowledged. At the
-- commit, as the transaction of a receive would keep consumers from writing the results that stay.
create or replace function pgqueue._at_housekeeping_results(at timestamptz) returns void
language plpgsql volatile set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
set enable_sort = off set jit = off as $$
declare
    kept tid[];
    gone tid[];
begin
    -- A fixed snapshot does not show messages that a compaction has moved since.
    if pgqueue._has_fixed_snapshot() then
        return;
    end if;
    select
        coalesce(array_agg(w.place) filter (where w.is_kept), '{}'),
        coalesce(array_agg(w.place) filter (where not w.is_kept), '{}')
    into kept, gone
    from (
        -- `offset 0` keeps the planner from a hash of all messages. The order, without a sort, keeps it from the index
        -- on due_at.
        select c.place, c.status <> 'successful' and (
                exists (select from pgqueue.dead_messages d where d.queue_name = c.queue_name and d.id = c.id offset 0)
                or exists (
                    select from pgqueue.scheduled_messages s
                    where s.queue_name = c.queue_name and s.id between c.id and c.id order by s.id offset 0)
                or exists (select from pgqueue.messages m where m.queue_name = c.queue_name and m.id = c.id offset 0)
            ) as is_kept
        from (
            select r.ctid as place, r.queue_name, r.id, r.status from pgqueue.results r
            where r.expires_at <= at
            order by r.expires_at limit 1000 for update skip locked
        ) c
    ) w;
    delete from pgqueue.results r where r.ctid = any (gone);
    update pgqueue.results r set expires_at = pgqueue._add_interval(at, greatest(r.expires_in, '1 h'))
    where r.ctid = any (kept);
    if cardinality(kept || gone) = 1000 then
        perform setval('pgqueue.next_housekeeping_at', pgqueue._to_micros(at + interval '1 s'));
    end if;
end;
$$;

create or replace function pgqueue.purge_results(queue_name pgqueue.queue_of_admin, min_age interval default '0')
returns bigint language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    before timestamptz;
    purged bigint;
begin
    perform pgqueue._require(pgqueue._is_interval_between(min_age, '0', '3652.5 days'),
        'min_age', min_age::text, 'an interval from 0 to 10 years (3652.5 days)');
    before := pgqueue._add_interval(pgqueue._now(), -min_age);
    delete from pgqueue.results r
    where r.ctid = any (array(
        select c.ctid from pgqueue.results c
        where c.queue_name = q.name and coalesce(c.finished_at, c.enqueued_at) <= before
            and (c.status = 'successful' or not (
                exists (select from pgqueue.dead_messages d where d.queue_name = q.name and d.id = c.id offset 0)
                -- As in _at_housekeeping_results.
                or exists (
                    select from pgqueue.scheduled_messages s
                    where s.queue_name = q.name and s.id between c.id and c.id order by s.id offset 0)
                or exists (
                    select from pgqueue.messages m
                    where (m.kind = q.kind or m.kind is null) and m.queue_name = q.name and m.id = c.id offset 0)))
        order by c.id limit 10000 for update skip locked));
    get diagnostics purged = row_count;
    return purged;
end;
$$;
comment on function pgqueue.purge_results is
'Deletes up to 10,000 results of the queue that have ended at least min_age ago, and returns how many. Repeat the call
until it returns 0. Results of messages that are ready, scheduled, in flight or dead letters stay. Claims delete results
that have expired, so this call is for what shall go earlier. Raises 22023, PQ001.';
