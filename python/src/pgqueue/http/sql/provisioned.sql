-- The queues of this database that the server made: it drops those alone, and makes none twice.
create table pgqueue_http.provisioned (
    queue_id uuid primary key,
    queue_name text not null,
    provisioned_at timestamptz not null default now()
);
