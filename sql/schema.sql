-- The schema that everything lives in. It is created, never adopted: if somebody made a schema
-- of this name before, the installation stops here.
create schema pgqueue;
comment on schema pgqueue is
'A message queue in PostgreSQL: enqueue, claim, ack, nack, extend, dead letters and redrive.';

-- For grants.sql, later in this transaction: an upgrade does not set it.
do $$ begin perform pg_catalog.set_config('pgqueue.installing', 'yes', true); end $$;
