-- Time. _now is the only function that reads the clock, so that a test can replace it inside its own transaction.

-- Not now(): it stands still in a transaction, so claims and delays would start in the past.
create or replace function pgqueue._now() returns timestamptz
language sql volatile parallel safe as $$ select clock_timestamp() $$;

-- A day counts as 24 hours. Plain addition would make it 23 or 25 where the TimeZone of the session changes its clocks.
create or replace function pgqueue._add_interval(moment timestamptz, span interval) returns timestamptz
language sql stable parallel safe as $$ select moment + interval '1 s' * date_part('epoch', span) $$;

-- Whether less than half of statement_timeout has passed since the client sent its statement; true if there is none.
-- Functions that treat any number of messages end after a slice if this is false, and later calls do the rest.
create or replace function pgqueue._has_time() returns boolean
language sql volatile as $$
    select current_setting('statement_timeout') = '0'
        or pgqueue._now() < statement_timestamp() + current_setting('statement_timeout')::interval / 2
$$;

-- Whether a claim that began at this time has to end its walk over messages that no claim has passed. The walk then
-- takes messages to remove, too: so it ends, and the register passes them. Inlined.
create or replace function pgqueue._is_walk_over(at timestamptz) returns boolean
language sql volatile as $$ select pgqueue._now() > at + interval '20 ms' and not pgqueue._has_time() $$;
