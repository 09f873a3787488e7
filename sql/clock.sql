-- The only reader of the clock, so that a test can replace it inside its own transaction.

create or replace function pgqueue._now()
returns timestamptz
language sql volatile parallel safe
as $$ select clock_timestamp() $$;
comment on function pgqueue._now() is
'The time of day. Not now(), which stands still in a transaction and would start claims and delays in the past.';
