-- What users have administered, or tried to.
create table pgqueue_http.audit (
    at timestamptz not null default now(),
    user_name text not null,
    token_name text,
    address text not null,
    act text not null,
    place text not null, -- service, database and queue
    status int not null
);
create index audit_by_age on pgqueue_http.audit (at);
