-- The answers to requests, written in the transactions of their effects. A request that is repeated with the same key
-- gets the stored answer and has no second effect.
create table pgqueue_http.effects (
    scope text not null,
    key text not null,
    fingerprint bytea not null,
    status int,
    answer text,
    done_at timestamptz not null default now(),
    primary key (scope, key)
);
create index effects_by_age on pgqueue_http.effects (done_at);
