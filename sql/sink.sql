-- Sends the messages of many writers in one commit. Each writer stages its messages under its own token. sink_commit
-- sends the messages of the successful attempts, all or none, and only once for each (app_id, version).

create or replace function pgqueue.sink_stage(
    queue_name pgqueue.queue_of_producer, run uuid, partition int, attempt bigint
) returns uuid
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_unlocked_queue(queue_name);
    token constant uuid := gen_random_uuid();
begin
    perform pgqueue._require(run is not null, 'run', null, 'the id of a run');
    perform pgqueue._require(partition is not null, 'partition', null, 'the number of a partition');
    perform pgqueue._require(attempt is not null, 'attempt', null, 'the number of an attempt');
    insert into pgqueue.staged_attempts (token, run, partition, attempt, queue_name, staged_by, staged_at)
    values (token, run, partition, attempt, q.name, session_user, pgqueue._now());
    return token;
end;
$$;
comment on function pgqueue.sink_stage is
'Starts to stage the messages that one attempt of one partition of a run writes for a queue, and returns a token. In the
same transaction the caller copies the messages into pgqueue.staged_messages under this token: as arrays, some hundred
messages per row, each row with the number of its first message, counted from 1. The copy raises 22023 or PQ003 for
messages that enqueue would refuse; sink_commit refuses those over a limit of the queue that was lowered since. No
session can claim the messages before sink_commit, which must be called by the same session_user. Raises 22023, PQ001.';

create or replace function pgqueue._check_messages(s pgqueue.staged_messages, a pgqueue.staged_attempts) returns void
language plpgsql volatile as $$
declare
    q pgqueue.queues;
    m record;
    error text;
    hint text;
begin
    select c.* into q from pgqueue.queues c where c.name = a.queue_name;
    for m in
        select u.*
        from unnest(
            s.payloads, s.bodies, s.headers, s.message_ids, s.delays, s.expires_in, s.group_keys, s.priorities,
            s.dedup_keys
        ) with ordinality
            as u (payload, body, headers, message_id, delay, expires_in, group_key, priority, dedup_key, place)
    loop
        perform pgqueue._check_keys(array[m.dedup_key], array[m.group_key], array[m.priority]);
        perform pgqueue._check_enqueue(coalesce(m.delay, '0'), m.expires_in);
        perform pgqueue._check_content(q, m.payload, m.body, m.headers);
    end loop;
exception when invalid_parameter_value or sqlstate 'PQ003' then
    get stacked diagnostics error = message_text, hint = pg_exception_hint;
    perform pgqueue._raise(
        'invalid_row', sqlstate, (s.row_number + m.place - 1)::text, a.partition::text, error, hint);
end;
$$;

create or replace function pgqueue._measure_messages() returns trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    are_sound boolean;
begin
    if num_nonnulls(new.group_keys, new.priorities) > 0 then
        new.headers := array(
            select pgqueue._with_group_and_priority(u.headers, u.group_key, u.priority)
            from unnest(new.headers, new.group_keys, new.priorities)
                with ordinality as u (headers, group_key, priority, place)
            order by u.place);
    end if;
    select
        count(*), coalesce(max(coalesce(octet_length(u.body), octet_length(u.payload::text))), 0),
        coalesce(bool_and(
            (u.payload is null) <> (u.body is null)
            and (
                u.headers is null
                or jsonb_typeof(u.headers) = 'object' and octet_length(u.headers::text) <= 65536
            )
            and (u.delay is null or pgqueue._is_interval_between(u.delay, '0', '3652.5 days'))
            and (u.expires_in is null or pgqueue._is_interval_between(u.expires_in, '0', '3652.5 days'))
            and (char_length(u.group_key) between 1 and 255) is not false
            and (u.priority between 0 and 9) is not false
        ), true)
    into new.messages, new.largest_bytes, are_sound
    from unnest(
        new.payloads, new.bodies, new.headers, new.message_ids, new.delays, new.expires_in, new.group_keys, new.priorities
    ) as u (payload, body, headers, message_id, delay, expires_in, group_key, priority);
    if num_nonnulls(variadic new.dedup_keys) > 0 then
        are_sound := are_sound and cardinality(new.dedup_keys) <= new.messages
            and not exists (select from unnest(new.dedup_keys) as k where char_length(k) not between 1 and 255);
    else
        new.dedup_keys := null;
    end if;
    if not are_sound or new.largest_bytes > (
        select q.max_payload_bytes
        from pgqueue.staged_attempts a join pgqueue.queues q on q.name = a.queue_name
        where a.token = new.token
    ) then
        perform pgqueue._check_messages(new, (select a from pgqueue.staged_attempts a where a.token = new.token));
    end if;
    new.group_keys := null;
    new.priorities := null;
    return new;
end;
$$;

create or replace trigger measure_messages
before insert on pgqueue.staged_messages for each row execute function pgqueue._measure_messages();

-- No other session sends or deletes these attempts until the transaction ends. In a security definer function,
-- current_user is the owner. In PL/pgSQL, which keeps its plan: see _level_registers.
create or replace function pgqueue._lock_own_attempts(run uuid) returns setof pgqueue.staged_attempts
language plpgsql volatile as $$
begin
    return query
    select a.* from pgqueue.staged_attempts a
    where a.run = _lock_own_attempts.run and a.staged_by = session_user
    order by a.token
    for update;
end;
$$;

-- Returns the number of messages sent of each token. Leaves out rows with a message over the limit of the queue.
create or replace function pgqueue._send_staged(q pgqueue.queues, tokens uuid[], expected bigint, at timestamptz)
returns bigint[] language plpgsql volatile set plan_cache_mode = force_generic_plan set enable_seqscan = off
set enable_bitmapscan = off set enable_sort = off set jit = off as $$
declare
    keys text[];
    ids bigint[];
    published bigint;
    delayed bigint;
    due_at timestamptz;
    sent bigint[];
begin
    if exists (select from pgqueue.staged_messages s where s.token = any (tokens) and s.dedup_keys is not null) then
        keys := array(
            select u.key
            from unnest(tokens) with ordinality as t (token, place)
            join pgqueue.staged_messages s on s.token = t.token
            cross join unnest(s.dedup_keys, array_fill(null::int, array[s.messages])) with ordinality
                as u (key, nothing, place)
            order by t.place, s.row_number, u.place
        );
    end if;
    -- If the number is wrong, sink_commit finds which messages are missing.
    if cardinality(keys) = expected then
        -- As in enqueue_batch, this lock is taken before the ids.
        lock table only pgqueue.messages in row exclusive mode;
        ids := array(select nextval('pgqueue.message_id') from generate_series(1, expected));
        -- The message of a key that is taken gets the id 0, and is counted but not sent.
        ids := array(
            select case when u.holder = u.id then u.id else 0 end
            from unnest(ids, pgqueue._take_dedup_keys(q, keys, ids, at, 'keep', '{}')) with ordinality
                as u (id, holder, place)
            order by u.place
        );
    end if;
    with staged as not materialized (
        select s.place + u.place as place, u.payload, u.body, u.headers, u.message_id, u.delay, u.expires_in, ids[s.place + u.place] as id
        from (
            select c.*, sum(c.messages) over (order by t.place, c.row_number) - c.messages as place
            from unnest(tokens) with ordinality as t (token, place)
            join pgqueue.staged_messages c on c.token = t.token
        ) s
        cross join unnest(s.payloads, s.bodies, s.headers, s.message_ids, s.delays, s.expires_in)
            with ordinality as u (payload, body, headers, message_id, delay, expires_in, place)
        where s.largest_bytes <= q.max_payload_bytes
    ),
    due as (
        insert into pgqueue.messages (
            id, queue_name, enqueued_at, visible_at, max_attempts, expires_at, message_id, payload, body, headers, kind
        )
        select
            coalesce(m.id, nextval('pgqueue.message_id')), q.name, at, at, q.max_attempts,
            pgqueue._add_interval(at, m.expires_in), m.message_id, m.payload, m.body, m.headers, q.kind
        from staged m
        where coalesce(m.delay, '0') = interval '0' and m.id is distinct from 0
        returning messages.id
    ),
    later as (
        insert into pgqueue.scheduled_messages (
            id, queue_name, due_at, enqueued_at, max_attempts, expires_at, message_id, payload, body, headers
        )
        select
            coalesce(d.id, nextval('pgqueue.message_id')), q.name,
            pgqueue._clamp_due_at(pgqueue._add_interval(at, d.delay) + (d.n - 1) * interval '1 microsecond'),
            at, q.max_attempts, pgqueue._add_interval(at, d.expires_in), d.message_id, d.payload, d.body, d.headers
        -- Give each message its own due_at: claims resume at the last due_at, and would read all removed entries that
        -- have the same one.
        from (
            select m.*, row_number() over (partition by m.delay order by m.place) as n
            from staged m
            where m.delay > interval '0' and m.id is distinct from 0
        ) d
        order by d.place
        returning scheduled_messages.due_at
    )
    select
        (select count(*) from due), count(*), min(l.due_at),
        array(
            select coalesce(sum(c.messages) filter (where c.largest_bytes <= q.max_payload_bytes), 0)
            from unnest(tokens) with ordinality as t (token, place)
            left join pgqueue.staged_messages c on c.token = t.token
            group by t.place order by t.place
        )
    into published, delayed, due_at, sent from later l;
    if delayed > 0 then
        perform pgqueue._announce_due(q, due_at);
    end if;
    perform pgqueue._count('enqueued', q.name, (published + delayed)::int);
    return sent;
end;
$$;

create or replace function pgqueue._discard_staged(run uuid) returns bigint
language plpgsql volatile as $$
declare
    tokens constant uuid[] := array(select a.token from pgqueue._lock_own_attempts(run) a);
    discarded bigint;
begin
    with gone as (delete from pgqueue.staged_messages s where s.token = any (tokens) returning s.messages)
    select coalesce(sum(g.messages), 0) into discarded from gone g;
    delete from pgqueue.staged_attempts a where a.token = any (tokens);
    return discarded;
end;
$$;

create or replace function pgqueue.sink_commit(
    run uuid,
    tokens uuid[],
    counts bigint[],
    app_id text default null,
    version bigint default null,
    caller pgqueue.caller default current_user
) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    -- A run without app_id is recorded under its own id, so that a call whose answer was lost can be repeated.
    ledger constant text := coalesce(app_id, run::text);
    entry constant bigint := coalesce(version, 0);
    earlier_role name;
    at timestamptz;
    part record;
    sent bigint[];
begin
    perform pgqueue._require(run is not null, 'run', null, 'the id of a run');
    perform pgqueue._require(cardinality(tokens) = (select count(distinct t) from unnest(tokens) as t),
        'tokens', tokens::text, 'an array of tokens that sink_stage returned, each once');
    perform pgqueue._require(
        cardinality(counts) = cardinality(tokens)
        and not exists (select from unnest(counts) as n where (n between 0 and 2147483647) is not true),
        'counts', counts::text, format('an array of %s, one for each token: the number of messages staged under it, from 0 to 2147483647',
            pgqueue._with_number(cardinality(tokens), 'element')));
    perform pgqueue._require(
        app_id is null or length(app_id) between 1 and 512, 'app_id', app_id, '1 to 512 characters, or null');
    perform pgqueue._require(
        num_nulls(app_id, version) <> 1, 'version', version::text, 'given if app_id is given, and null otherwise');
    perform pgqueue._require_untruncated('{pgqueue.staged_attempts,pgqueue.staged_messages,pgqueue.sink_commits}');
    -- Lock the queues first, in the order of their names. From here on none of them can be dropped.
    perform case
        when pgqueue._may_use(caller, n.queue_name, pgqueue._privileges_of('{producer}'))
            then pgqueue._get_locked_queue(n.queue_name) is null
        else pgqueue._raise('queue_not_found', n.queue_name) is null
    end
    from (
        select distinct a.queue_name from pgqueue.staged_attempts a
        where a.run = sink_commit.run and a.staged_by = session_user and a.token = any (tokens)
        order by a.queue_name
    ) n;
    -- A concurrent commit of the same version waits at this insert until the first commit ends, and then finds its
    -- entry.
    insert into pgqueue.sink_commits (app_id, version, run, messages, committed_by, committed_at)
    select ledger, entry, run, coalesce(sum(n), 0), session_user, pgqueue._now() from unnest(counts) as n
    on conflict do nothing;
    if not found then
        -- Messages must not be discarded because of another role's entry: that would lose them.
        select c.committed_by into earlier_role from pgqueue.sink_commits c
        where c.app_id = ledger collate "C" and c.version = entry;
        if earlier_role <> session_user then
            perform pgqueue._raise_invalid('app_id', ledger,
                format('an app_id of your own: version %s of this one was committed by role %I', entry, earlier_role));
        end if;
        perform pgqueue._discard_staged(run);
        return false;
    end if;
    perform pgqueue._require(
        not exists (
            select from pgqueue.sink_commits c where c.app_id = ledger collate "C" and c.forgotten_version >= entry),
        'version', entry::text, format('higher than the versions of app_id %L that sweep_staged has forgotten: it is not known whether this one was committed', ledger));

    for part in
        select
            c as queue, array_agg(t.token order by t.place) as tokens, array_agg(t.expected order by t.place) as counts
        from unnest(tokens, counts) with ordinality as t (token, expected, place)
        left join pgqueue._lock_own_attempts(run) a on a.token = t.token
        left join pgqueue.queues c on c.name = a.queue_name
        group by c.name
        order by c.name
    loop
        -- Read the clock after all locks are taken: delays count from this time.
        at := pgqueue._now();
        sent := pgqueue._send_staged(part.queue, part.tokens, (select sum(n) from unnest(part.counts) as n)::bigint, at);
        if sent <> part.counts then
            perform pgqueue._check_messages(s, a)
            from pgqueue.staged_messages s join pgqueue.staged_attempts a on a.token = s.token
            where s.token = any (part.tokens) and s.largest_bytes > (part.queue).max_payload_bytes
            order by array_position(part.tokens, s.token), s.row_number;
            perform pgqueue._require_current_snapshot(format('run %s', run));
            perform pgqueue._raise(
                'staged_messages_lost', sink_commit.run::text, a.partition::text, n.expected::text, n.sent::text)
            from unnest(part.tokens, part.counts, sent) with ordinality as n (token, expected, sent, place)
            left join pgqueue._lock_own_attempts(sink_commit.run) a on a.token = n.token
            where n.sent <> n.expected
            order by n.place limit 1;
        end if;
        perform pgqueue._wake_if_waiting(part.queue, pgqueue._now());
    end loop;
    perform pgqueue._discard_staged(run);
    return true;
end;
$$;
comment on function pgqueue.sink_commit is
'Sends the staged messages of a run in one transaction and returns true. From each attempt named in tokens it sends
exactly the number of messages given in counts, in their order and by the rules of enqueue; delays count from now. A
message whose dedup_key is taken, by an earlier message or by an earlier one of the same commit, is not sent, as with
enqueue_batch and on_duplicate keep; counts contains it. A commit with keys waits for transactions that have sent one of
them. Messages of the other attempts of the run are discarded. If version of app_id was committed before, it discards
all messages and returns false. A run without app_id is identified by run, so that the call can be repeated until it is
answered. Raises PQ010 if staged messages are missing, for example after a crash of the server; PQ001 if a queue was
dropped; PQ003 for the first message over the limit of its queue, with its row; and 22023 if the version was committed
by another role, or is not higher than those that sweep_staged has forgotten.';

create or replace function pgqueue.sink_abort(run uuid) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    perform pgqueue._require(run is not null, 'run', null, 'the id of a run');
    return pgqueue._discard_staged(run);
end;
$$;
comment on function pgqueue.sink_abort is
'Discards the messages that the caller''s own role has staged in a run and not committed, and returns how many there
were. Raises 22023.';

create or replace function pgqueue.sweep_staged(
    older_than interval default '1 day', forget_after interval default '90 days',
    caller pgqueue.caller default current_user
) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    tokens uuid[];
    swept bigint;
begin
    perform pgqueue._require_admin_of_all(caller, 'sweep_staged');
    perform pgqueue._require(pgqueue._is_interval_between(older_than, '0', '3652.5 days'),
        'older_than', older_than::text, 'an interval from 0 to 10 years (3652.5 days)');
    perform pgqueue._require(pgqueue._is_interval_between(forget_after, '0', '3652.5 days'),
        'forget_after', forget_after::text, 'an interval from 0 to 10 years (3652.5 days)');
    perform pgqueue._require_untruncated('{pgqueue.staged_attempts,pgqueue.staged_messages,pgqueue.sink_commits}');
    -- One sweep at a time: a sweep must see which versions other sweeps have deleted from the ledger.
    lock table pgqueue.sink_commits in share update exclusive mode;
    -- Attempts that are being committed are locked. They are skipped.
    tokens := array(
        select a.token from pgqueue.staged_attempts a
        where a.staged_at <= pgqueue._add_interval(at, -older_than)
        order by a.token for update skip locked
    );
    delete from pgqueue.staged_attempts a where a.token = any (tokens);
    -- Also delete messages that were copied under a token that sink_stage never returned.
    with gone as (
        delete from pgqueue.staged_messages s
        where s.token = any (tokens) or not exists (select from pgqueue.staged_attempts a where a.token = s.token)
        returning s.messages
    )
    select coalesce(sum(g.messages), 0) into swept from gone g;

    with newest as (
        select c.app_id, max(c.version) as version from pgqueue.sink_commits c group by c.app_id
    ),
    forgotten as (
        delete from pgqueue.sink_commits c
        using newest n
        where n.app_id = c.app_id and c.committed_at <= pgqueue._add_interval(at, -forget_after)
            and (c.version < n.version or c.app_id = c.run::text)
        returning c.app_id, c.version
    )
    update pgqueue.sink_commits c
    set forgotten_version = greatest(c.forgotten_version, f.version)
    from (select o.app_id, max(o.version) as version from forgotten o group by o.app_id) f
    join newest n on n.app_id = f.app_id
    where c.app_id = f.app_id and c.version = n.version;
    return swept;
end;
$$;
comment on function pgqueue.sweep_staged is
'Discards messages that were staged more than older_than (0 to 10 years, default 1 day) ago, because the driver of their
run died, and returns how many there were. A run that takes longer than that fails with PQ010. Also deletes commits
older than forget_after (0 to 10 years, default 90 days) from the ledger, but never the highest version of an app_id: a
lower version that was forgotten is refused from then on, and not sent twice. Raises 22023, and 42501 without admin
access to all queues.';

create or replace function pgqueue._findings_of_sink(q pgqueue.queues) returns setof pgqueue.finding
language plpgsql volatile as $$
declare
    at constant timestamptz := pgqueue._now();
begin
    -- On a standby, reading an unlogged table raises an error.
    if q.name is null and not pg_is_in_recovery() then
        return query
        select
            'warning', null::text, 'stale_staging',
            format('never committed: %s of %s, staged by %s and up to %s old; the driver of each run died',
                pgqueue._with_number(s.attempts, 'attempt'), pgqueue._with_number(s.runs, 'run'), s.staged_by, at - s.oldest_at),
            'select pgqueue.sweep_staged();'
        from (
            select a.staged_by, count(*) as attempts, count(distinct a.run) as runs, min(a.staged_at) as oldest_at
            from pgqueue.staged_attempts a
            where a.staged_at <= at - interval '1 day'
            group by a.staged_by
        ) s
        order by s.staged_by;
    end if;
end;
$$;
