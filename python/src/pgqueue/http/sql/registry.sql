-- The requested queues, and the tasks of agents.
create table pgqueue_http.queues (
    id uuid primary key default gen_random_uuid(),
    service_id text not null,
    name text not null collate "C",
    database_name text not null,
    visibility_timeout_seconds int not null,
    max_attempts int not null,
    dlq_enabled boolean not null,
    status text not null default 'Pending',
    error_message text,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    deleted_at timestamptz,
    constraint queues_status_is_known
    check (status in ('Pending', 'Provisioning', 'Active', 'Deprovisioning', 'Failed'))
);
create unique index queues_name_is_taken on pgqueue_http.queues (service_id, name) where deleted_at is null;
create index queues_by_name on pgqueue_http.queues (service_id, name);

create table pgqueue_http.tasks (
    id uuid primary key default gen_random_uuid(),
    queue_id uuid not null references pgqueue_http.queues,
    kind text not null,
    status text not null default 'pending',
    request jsonb,
    result jsonb,
    error_message text,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    constraint tasks_kind_is_known check (kind in ('provision', 'deprovision', 'enqueue', 'stats')),
    constraint tasks_status_is_known check (status in ('pending', 'running', 'completed', 'failed'))
);
create index tasks_by_queue on pgqueue_http.tasks (queue_id);
create index tasks_by_age on pgqueue_http.tasks (created_at);
