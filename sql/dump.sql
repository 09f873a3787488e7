-- What pg_dump has to carry: every table and sequence of the extension that holds data.
-- Registers, dedicated partitions and the days of the archive are made later, by functions, and dumped as they are.
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
-- What is staged outlives neither a crash nor a dump; what was committed must.
select pg_extension_config_dump('pgqueue.staged_attempts', 'where false');
select pg_extension_config_dump('pgqueue.staged_messages', 'where false');
select pg_extension_config_dump('pgqueue.sink_commits', '');
