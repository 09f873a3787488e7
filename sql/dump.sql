-- What pg_dump has to carry: every table and sequence of the extension that holds data.
-- Registers and dedicated partitions are made later, by create_queue, and dumped as they are.
select pg_extension_config_dump('pgqueue.queue_id', '');
select pg_extension_config_dump('pgqueue.queues', '');
select pg_extension_config_dump('pgqueue.message_id', '');
select pg_extension_config_dump('pgqueue.messages', '');
select pg_extension_config_dump('pgqueue.messages_shared', '');
select pg_extension_config_dump('pgqueue.scheduled_messages', '');
select pg_extension_config_dump('pgqueue.dead_messages', '');
select pg_extension_config_dump('pgqueue.returns', '');
select pg_extension_config_dump('pgqueue.sweeps', '');
select pg_extension_config_dump('pgqueue.streams', '');
