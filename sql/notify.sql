-- Notifications: an enqueue wakes the consumers that wait. One that nobody waits for costs nothing.

create or replace function pgqueue.channel(queue_name text)
returns text
language sql immutable strict parallel safe
as $$ select 'pgqueue_' || case when octet_length(queue_name) <= 54 then queue_name else md5(queue_name) end $$;
comment on function pgqueue.channel(text) is
'The channel to listen on: pgqueue_ and the queue''s name, or its MD5 where that exceeds an identifier. Notifications carry no payload.';

create or replace function pgqueue._wake(q pgqueue.queues)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    -- The register stays as it is: a transaction that cleared it, and then went on for long or rolled back, would
    -- leave the consumer asleep over what others commit in the meantime.
    perform pg_notify(pgqueue.channel(q.name), '');
end;
$$;
comment on function pgqueue._wake(pgqueue.queues) is
'Notifies the consumers that wait, when the transaction commits.';

create or replace function pgqueue._wake_waiting(q pgqueue.queues, at timestamptz)
returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    until constant bigint := pgqueue._register_value(q.waiting_until);
    longest constant bigint := pgqueue._to_micros(at + interval '24 h');
begin
    if until > pgqueue._to_micros(at) then
        perform pgqueue._wake(q);
    end if;
    -- Nobody waits for so long: a clock that was wrong would have every enqueue notify until then.
    if until > longest then
        perform setval(q.waiting_until, longest);
    end if;
end;
$$;
comment on function pgqueue._wake_waiting(pgqueue.queues, timestamptz) is
'Notifies the consumers, if any wait.';
