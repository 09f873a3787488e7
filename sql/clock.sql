-- Moments. _now is the only reader of the clock, so that a test can replace it inside its own transaction.

create or replace function pgqueue._now()
returns timestamptz
language sql volatile parallel safe
as $$ select clock_timestamp() $$;
comment on function pgqueue._now() is
'The time of day. Not now(), which stands still in a transaction and would start claims and delays in the past.';

create or replace function pgqueue._add_interval(moment timestamptz, span interval)
returns timestamptz
language sql stable parallel safe
as $$ select moment + interval '1 s' * date_part('epoch', span) $$;
comment on function pgqueue._add_interval(timestamptz, interval) is
'The moment that lies a span later. A day is 24 hours: added as a day it would be 23 or 25 where the clocks of the session''s TimeZone change.';

create or replace function pgqueue._is_first_statement()
returns boolean
language sql volatile
as $$
    select statement_timestamp() - transaction_timestamp() < interval '5 ms'
        and current_query() !~* e'(^|;)\\s*(begin|start)\\M|\\mreceive\\M'
$$;
comment on function pgqueue._is_first_statement() is
'Whether the transaction began with this statement or just before, and so may commit right behind it. Not by equality: a driver sends a statement as several messages, each of which has a time of its own. Not who begins in the same query, or receives: he goes on with his work.';
