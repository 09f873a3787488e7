-- What `create or replace` cannot say of the way from 0.1.0 to 0.2.0-dev.
create index schedules_queue_name on pgqueue.schedules (queue_name);
