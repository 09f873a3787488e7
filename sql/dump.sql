-- Marks the tables and sequences of the extension whose data pg_dump must include. Registers, dedicated partitions and
-- the partitions of the archive are created later, by functions, and pg_dump includes them as ordinary objects.
select pg_extension_config_dump('pgqueue.queue_id', '');
select pg_extension_config_dump('pgqueue.queues', '');
select pg_extension_config_dump('pgqueue.message_id', '');
select pg_extension_config_dump('pgqueue.messages', '');
select pg_extension_config_dump('pgqueue.messages_shared', '');
select pg_extension_config_dump('pgqueue.scheduled_messages', '');
select pg_extension_config_dump('pgqueue.dead_messages', '');
select pg_extension_config_dump('pgqueue.archived_messages', '');
select pg_extension_config_dump('pgqueue.unfiled_messages', '');
select pg_extension_config_dump('pgqueue.next_housekeeping_at', '');
select pg_extension_config_dump('pgqueue.archive_promises', '');
select pg_extension_config_dump('pgqueue.requeued_messages', '');
select pg_extension_config_dump('pgqueue.sweep_state', '');
select pg_extension_config_dump('pgqueue.streams', '');
select pg_extension_config_dump('pgqueue.subscriptions', '');
select pg_extension_config_dump('pgqueue.transports', '');
-- Staged messages are not dumped, as they do not survive a crash either. The ledger of commits is dumped.
select pg_extension_config_dump('pgqueue.staged_attempts', 'where false');
select pg_extension_config_dump('pgqueue.staged_messages', 'where false');
select pg_extension_config_dump('pgqueue.sink_commits', '');
