-- The queues that the server has created in this database, and their created_at: a later queue of the same name has
-- another one. It drops only these, and creates none twice.
create table pgqueue_http.provisioned (
    queue_id uuid primary key,
    queue_name text not null,
    provisioned_at timestamptz not null default now()
);
