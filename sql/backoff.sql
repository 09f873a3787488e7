-- The delay of a message after a failed attempt, if the consumer gives none.

create or replace function pgqueue._backoff(q pgqueue.queues, attempt_count int) returns interval
language sql volatile parallel safe as $$
    select interval '1 s' * (
        least(
            date_part('epoch', q.backoff_max),
            date_part('epoch', q.backoff_base) * q.backoff_factor ^ least(attempt_count - 1, 100)
        ) * (1 - q.backoff_jitter * random())
    )
$$;
