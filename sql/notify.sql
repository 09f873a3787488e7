-- Notifications: an enqueue notifies waiting consumers. If no consumer waits, it sends no notification.

-- Not strict: PostgreSQL could not inline it.
create or replace function pgqueue.channel(queue_name text) returns text
language sql immutable parallel safe
as $$ select 'pgqueue_' || case when octet_length(queue_name) <= 54 then queue_name else md5(queue_name) end $$;
comment on function pgqueue.channel is
'Returns the notification channel of a queue: pgqueue_ and the name of the queue, or the MD5 of the name if the channel
would be longer than an identifier. Notifications carry no payload.';

create or replace function pgqueue._count_dead(q pgqueue.queues, messages int) returns void
language plpgsql volatile as $$
begin
    if pgqueue._count('dead', q.name, messages) > 0 and q.dead_letter_to is not null then
        perform pg_notify(pgqueue.channel(q.dead_letter_to), '');
    end if;
end;
$$;

create or replace function pgqueue._wake_if_waiting(q pgqueue.queues, at timestamptz) returns void
language plpgsql volatile as $$
declare
    until constant bigint := pgqueue._register_value(q.waiting_until);
    longest constant bigint := pgqueue._to_micros(at + interval '24 h');
begin
    if until > pgqueue._to_micros(at) then
        -- The register is not cleared. If a transaction cleared it and then ran for long or rolled back, other
        -- transactions would not notify in the meantime, and the consumer would sleep past their messages.
        perform pg_notify(pgqueue.channel(q.name), '');
    end if;
    -- No consumer waits for longer. The value was set while the clock was wrong, and every enqueue would notify until
    -- then.
    if until > longest then
        perform setval(q.waiting_until, longest);
    end if;
end;
$$;

create or replace function pgqueue._announce_due(q pgqueue.queues, due_at timestamptz) returns void
language plpgsql volatile as $$
begin
    -- prepare_wait detects running senders by this lock. So the lock is taken before the registers are read.
    lock table only pgqueue.messages in row exclusive mode;
    if pgqueue._to_micros(due_at) < pg_sequence_last_value(q.first_due_at) then
        perform setval(q.first_due_at, pgqueue._to_micros(due_at));
    end if;
    -- Without a notification, a waiting consumer could sleep past this due time.
    perform pgqueue._wake_if_waiting(q, pgqueue._now());
end;
$$;
