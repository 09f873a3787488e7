-- How long a message waits after a failed attempt, where the consumer does not say.

create or replace function pgqueue._backoff(q pgqueue.queues, attempt_count int)
returns interval
language sql volatile parallel safe
as $$
    select interval '1 s' * (
        least(
            date_part('epoch', q.backoff_max),
            date_part('epoch', q.backoff_base) * q.backoff_factor ^ least(attempt_count - 1, 100)
        ) * (1 - q.backoff_jitter * random())
    )
$$;
comment on function pgqueue._backoff(pgqueue.queues, int) is
'backoff_base times backoff_factor for every attempt after the first, at most backoff_max, less a random part of up to backoff_jitter.';
