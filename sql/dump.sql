-- Marks the tables and sequences of the extension whose data pg_dump must include. Registers, dedicated partitions and
-- the partitions of the archive are created later, by functions, and pg_dump includes them as ordinary objects.
do $$
declare
    name text;
begin
    foreach name in array array[
        'queue_id', 'message_id', 'messages', 'archived_messages', 'unfiled_messages', 'next_housekeeping_at',
        'next_maintenance_at', 'archive_clock', 'archive_promises', 'subscriptions', 'schedules', 'results',
        'dedup_keys', 'transports'
    ] loop
        perform pg_extension_config_dump(format('pgqueue.%I', name), '');
    end loop;
    -- Staged messages are not dumped, as they do not survive a crash either. The ledger of commits is dumped.
    foreach name in array array['staged_attempts', 'staged_messages', 'compactions'] loop
        perform pg_extension_config_dump(format('pgqueue.%I', name), 'where false');
    end loop;
    -- A compaction of a table between the snapshot of a dump and the lock of that table would leave its messages out
    -- of the dump. The condition lets such a dump fail: pg_class shows the file of each table as of the snapshot,
    -- pg_relation_filenode shows the current one. pg_dump locks a member of an extension only when it copies it, so
    -- each table has the condition. It contains only built-in functions, as the role that dumps may call no other. The
    -- text becomes the error, because it is no boolean.
    foreach name in array array[
        'queues', 'messages_shared', 'messages_grouped', 'messages_prioritized', 'messages_prioritized_limited', 'messages_limited',
        'scheduled_messages', 'dead_messages', 'requeued_messages', 'sweep_state', 'streams',
        'sink_commits', 'dedup_keys_0', 'dedup_keys_1', 'dedup_keys_2', 'dedup_keys_3', 'dedup_keys_4', 'dedup_keys_5',
        'dedup_keys_6', 'dedup_keys_7', 'dedup_keys_8'
    ] loop
        perform pg_extension_config_dump(format('pgqueue.%I', name), $condition$where not exists (
            select from pg_catalog.pg_class c
            where c.relnamespace = 'pgqueue'::pg_catalog.regnamespace and c.relkind = 'r'
                and c.relname !~ '^archived_messages_' and pg_catalog.pg_relation_filenode(c.oid) <> c.relfilenode
                and case when pg_catalog.pg_relation_filenode(c.oid) <> c.relfilenode then (
                    'repeat the dump, because pgqueue.' || c.relname || ' was compacted after the dump took its snapshot'
                )::boolean end
        )$condition$);
    end loop;
end;
$$;
