-- The schema of all objects. The installation fails if a schema of this name already exists: it is never adopted.
create schema pgqueue;
comment on schema pgqueue is
'A message queue in PostgreSQL: enqueue, claim, ack, nack, extend, dead letters and redrive.';

-- grants.sql reads this setting later in the same transaction. An upgrade does not set it.
do $$ begin perform pg_catalog.set_config('pgqueue.installing', 'yes', true); end $$;
