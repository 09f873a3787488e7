-- The bearer tokens of users. Only the SHA-256 digest of a token is kept, so a copy of this table opens nothing.
create table pgqueue_http.tokens (
    name text primary key,
    user_name text not null,
    digest bytea not null unique,
    allow text[], -- null: what the user may do
    created_at timestamptz not null default now(),
    expires_at timestamptz not null
);
