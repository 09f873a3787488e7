-- The figures of each queue, for the charts of the page. A row stands for 1 minute or for 15 minutes. Rows of a minute
-- are deleted after 75 minutes and rows of 15 minutes after a day, so a queue has fewer than 180 rows.
create table pgqueue_http.depth_history (
    service_id text not null,
    database_name text not null,
    queue_name text not null collate "C",
    minutes smallint not null,
    begins_at timestamptz not null,
    depth bigint not null,
    dead bigint not null,
    oldest_age_seconds double precision not null,
    -- Messages per second; null if unknown.
    incoming double precision,
    outgoing double precision,
    primary key (service_id, database_name, queue_name, minutes, begins_at),
    constraint depth_history_minutes_are_known check (minutes in (1, 15))
);
create index depth_history_by_age on pgqueue_http.depth_history (minutes, begins_at);
