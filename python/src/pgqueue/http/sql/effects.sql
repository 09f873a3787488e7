-- What was done, and what was answered: written in the transaction of the effect itself, so that
-- whoever comes again with the same key gets the answer, and nothing happens twice.
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
