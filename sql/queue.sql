-- Creates, alters, looks up and pauses queues. Functions that use a queue get its row from
-- _get_locked_queue, so that a check for all of them has one place.

create or replace function pgqueue._public_queue(q pgqueue.queues) returns pgqueue.queue
language sql stable as $$
    select row(
        q.name, q.visibility_timeout, coalesce(nullif(q.max_attempts, 2147483647), 0), q.dlq_enabled,
        q.dead_letter_expired, q.max_payload_bytes, q.backoff_base, q.backoff_factor, q.backoff_max, q.backoff_jitter,
        q.dedicated, q.paused_at, q.created_at, q.updated_at, q.archive_for, q.expires_after_idle,
        q.dedup_window, q.group_limit, q.on_dead, q.max_in_flight, q.rate_limit, q.rate_period, q.priorities,
        q.counters, q.dead_letter_to
    )::pgqueue.queue
$$;

create or replace function pgqueue._is_interval_between(span interval, least_span interval, most_span interval)
returns boolean language sql immutable parallel safe as $$
    -- The length in seconds is compared, too: '300000 years -108000000 days' compares as equal to 0, but added to a
    -- moment it leads out of the calendar.
    select span between least_span and most_span
        and date_part('epoch', span) between date_part('epoch', least_span) and date_part('epoch', most_span)
$$;

create or replace function pgqueue._check_visibility_timeout(visibility_timeout interval) returns void
language plpgsql stable as $$
begin
    if not pgqueue._is_interval_between(visibility_timeout, '1 s', '43200 s') then
        perform pgqueue._raise_invalid(
            'visibility_timeout', visibility_timeout::text, 'an interval from 1 second to 12 hours (43200 s)');
    end if;
end;
$$;

-- on_dead and rate_period are those that were given: a queue keeps both when alter_queue ends the limit to which they
-- belong.
create or replace function pgqueue._check_settings(q pgqueue.queues, on_dead text, rate_period interval) returns void
language sql stable as $$
    select pgqueue._raise_invalid(s.name, s.given, s.expected)
    from (values
        ('visibility_timeout', q.visibility_timeout::text, pgqueue._is_interval_between(q.visibility_timeout, '1 s', '43200 s'),
            'an interval from 1 second to 12 hours (43200 s)'),
        ('max_attempts', q.max_attempts::text, q.max_attempts between 1 and 100 or q.max_attempts = 2147483647, 'an integer from 1 to 100, or 0 for no limit'),
        ('max_payload_bytes', q.max_payload_bytes::text, q.max_payload_bytes between 1 and 104857600, 'an integer from 1 to 104857600 (100 MB)'),
        ('backoff_base', q.backoff_base::text, pgqueue._is_interval_between(q.backoff_base, '0', '30 days'), 'an interval from 0 to 30 days'),
        ('backoff_max', q.backoff_max::text, pgqueue._is_interval_between(q.backoff_max, '0', '30 days'), 'an interval from 0 to 30 days'),
        ('backoff_factor', q.backoff_factor::text, q.backoff_factor between 1 and 100, 'a number from 1 to 100'),
        ('backoff_jitter', q.backoff_jitter::text, q.backoff_jitter between 0 and 1, 'a number from 0 to 1'),
        ('archive_for', q.archive_for::text, q.archive_for is null or pgqueue._is_interval_between(q.archive_for, '1 day', '3652.5 days'),
            'an interval from 1 day to 10 years (3652.5 days)'),
        ('expires_after_idle', q.expires_after_idle::text,
            q.expires_after_idle is null or pgqueue._is_interval_between(q.expires_after_idle, '1 s', '3652.5 days'),
            'an interval from 1 s to 10 years (3652.5 days), or null for never'),
        ('dedup_window', q.dedup_window::text,
            pgqueue._is_interval_between(q.dedup_window, '0', '0') or pgqueue._is_interval_between(q.dedup_window, '1 s', '30 days'),
            'an interval from 1 s to 30 days, or 0 for as long as the message lives'),
        ('group_limit', q.group_limit::text, q.group_limit is null or q.group_limit between 1 and 1000,
            'an integer from 1 to 1000, or null for a queue without groups'),
        ('on_dead', q.on_dead, q.on_dead in ('skip', 'hold'), 'skip or hold'),
        ('max_in_flight', q.max_in_flight::text, q.max_in_flight is null or q.max_in_flight between 1 and 10000,
            'an integer from 1 to 10000, or null for no limit'),
        ('rate_limit', q.rate_limit::text, q.rate_limit is null or q.rate_limit between 1 and 1000000,
            'an integer from 1 to 1000000, or null for no limit'),
        ('rate_period', q.rate_period::text, pgqueue._is_interval_between(q.rate_period, '1 ms', '1 day'), 'an interval from 1 ms to 1 day'),
        ('priorities', null, q.priorities is not null, 'true or false'),
        ('priorities', 'true', not q.priorities or q.group_limit is null, 'false for a queue with group_limit: its claims follow the groups'),
        ('counters', null, q.counters is not null, 'true or false'),
        ('dedicated', null, q.dedicated is not null, 'true or false'),
        ('dlq_enabled', null, q.dlq_enabled is not null, 'true or false'),
        ('on_dead', 'hold', q.on_dead = 'skip' or q.dlq_enabled,
            'skip while dlq_enabled is false: a message that is deleted cannot keep its group waiting'),
        ('dead_letter_to', q.dead_letter_to, q.dead_letter_to is null or q.dlq_enabled, 'null while dlq_enabled is false: there are no dead letters'),
        ('on_dead', 'hold', q.on_dead = 'skip' or q.dead_letter_to is null,
            'skip while dead_letter_to is set: a dead letter that leaves the queue cannot keep its group waiting'),
        ('dead_letter_expired', null, q.dead_letter_expired is not null, 'true or false'),
        ('on_dead', on_dead, q.group_limit is not null or coalesce(on_dead, 'skip') = 'skip',
            'skip without group_limit: no message waits for one of its group'),
        ('rate_period', rate_period::text, q.rate_limit is not null or coalesce(rate_period, '1 s') = '1 s',
            '1 s, its default, without rate_limit: there is no rate that it could change')
    ) as s (name, given, is_valid, expected)
    where s.is_valid is not true
$$;

-- The new queue is dedicated if a table was left for it.
create or replace function pgqueue._add_queue(model pgqueue.queues, if_not_exists boolean) returns pgqueue.queues
language plpgsql volatile as $$
declare
    q pgqueue.queues;
    has_table boolean;
begin
    -- The lookup before the lock avoids a wait for the users of an existing queue. The lookup is repeated under the
    -- lock, which serializes this call with other create_queue and drop_queue calls.
    select queues.* into q from pgqueue.queues where queues.name = model.name;
    -- As in _get_locked_queue, a fixed snapshot can be older than a drop_queue.
    if not found or (pgqueue._has_fixed_snapshot() and pg_relation_size(q.fresh_from_id) is null)
        -- A session that drops the idle queue at this moment has the lock.
        or (q.expires_after_idle is not null and not pg_try_advisory_xact_lock_shared(pgqueue._lock_key(model.name)))
    then
        perform pg_advisory_xact_lock(pgqueue._lock_key(model.name));
        select queues.* into q from pgqueue.queues where queues.name = model.name;
        if found and pg_relation_size(q.fresh_from_id) is null then
            perform pgqueue._raise('stale_snapshot', format('queue %L', model.name));
        end if;
    end if;
    if q.name is not null then
        if not if_not_exists then
            perform pgqueue._raise('queue_exists', model.name);
        end if;
        if q.expires_after_idle is not null then
            -- This call counts as a use of the queue: the idle time starts again.
            perform setval(q.next_sweep_at, pgqueue._to_micros(pgqueue._now()));
        end if;
        return q;
    end if;
    -- This insert comes first. It fails if there is a queue of this name that the snapshot does not show.
    insert into pgqueue.sweep_state (queue_name) values (model.name) on conflict do nothing;
    model.queue_id := pgqueue._take_number(model.name);
    has_table := to_regclass(format('pgqueue.messages_%s', model.queue_id)) is not null;
    if has_table and (model.priorities or coalesce(model.group_limit, model.max_in_flight) is not null) then
        -- The claims of the new queue take the messages over.
        update pgqueue.messages m set kind = null where m.kind = 1000 + model.queue_id;
        execute format('drop table pgqueue.messages_%s cascade', model.queue_id);
        has_table := false;
    end if;
    if model.dedicated and not has_table then
        perform pgqueue._create_partition(model);
    end if;
    model.dedicated := model.dedicated or has_table;
    model.created_at := pgqueue._now();
    model.updated_at := model.created_at;
    -- All columns but kind, which is computed.
    execute format('insert into pgqueue.queues (%1$s) select %1$s from (select ($1).*) q', (
        select string_agg(quote_ident(a.attname), ', ') from pg_attribute a
        where a.attrelid = 'pgqueue.queues'::regclass and a.attnum > 0 and not a.attisdropped and a.attgenerated = ''))
    using model;
    select queues.* into q from pgqueue.queues where queues.name = model.name;
    if q.counters then
        perform pgqueue._create_sequence(pgqueue._sequence_name(r, q.name)) from unnest(pgqueue._counter_roles()) as r;
    else
        perform pgqueue._drop_counters(q.name);
    end if;
    perform pgqueue._call_queue_handlers(null, q);
    return q;
exception
    when lock_not_available then
        perform pgqueue._raise('queue_busy', model.name, 'create_queue');
        return null;
    when serialization_failure then
        perform pgqueue._raise('stale_snapshot', format('queue %L', model.name));
        return null;
end;
$$;

create or replace function pgqueue.create_queue(
    queue_name pgqueue.new_queue_of_admin,
    visibility_timeout interval default '30 s',
    max_attempts int default 5,
    dlq_enabled boolean default true,
    dedicated boolean default false,
    dead_letter_expired boolean default false,
    max_payload_bytes int default 262144,
    backoff_base interval default '1 s',
    backoff_factor double precision default 2,
    backoff_max interval default '10 min',
    backoff_jitter double precision default 0.2,
    if_not_exists boolean default false,
    archive_for interval default null,
    expires_after_idle interval default null,
    dedup_window interval default '5 min',
    group_limit int default null,
    on_dead text default 'skip',
    max_in_flight int default null,
    rate_limit int default null,
    rate_period interval default '1 s',
    priorities boolean default false,
    counters boolean default true,
    dead_letter_to pgqueue.queue_of_admin default null
) returns pgqueue.queue
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500 ms'
set jit = off as $$
declare
    q pgqueue.queues;
begin
    perform pgqueue._require(pgqueue._is_name(queue_name), 'queue_name', queue_name,
        '1 to 128 characters: lowercase letters, digits, hyphens and underscores');
    perform pgqueue._require(if_not_exists is not null, 'if_not_exists', null, 'true or false');
    q := row(
        queue_name, visibility_timeout,
        -- No limit is stored as the highest integer, as plain SQL that claims compares attempt_count with it.
        case max_attempts when 0 then 2147483647 else max_attempts end, dlq_enabled, dead_letter_expired,
        max_payload_bytes, backoff_base, backoff_factor, backoff_max, backoff_jitter, dedicated,
        -- From paused_at to waiting_until.
        null, null, null, null, null, null, null, null, null,
        archive_for, expires_after_idle, dedup_window, group_limit, on_dead, max_in_flight, rate_limit, rate_period,
        priorities, counters, dead_letter_to, null);
    perform pgqueue._check_settings(q, on_dead, rate_period);
    return pgqueue._public_queue(pgqueue._add_queue(q, if_not_exists));
end;
$$;
comment on function pgqueue.create_queue is
'Creates a queue and returns it. queue_name has 1 to 128 characters: a-z, 0-9, hyphen and underscore. visibility_timeout
(1 s to 43200 s) is the time for which a claimed message is hidden. After max_attempts (1 to 100) attempts a message
goes to the dead letters if dlq_enabled is true, else it is deleted; 0 means that a message has any number of attempts,
and its max_attempts is 2147483647. An expired message goes to the dead letters if dead_letter_expired is true, else it
is deleted. dedicated gives the queue a table of its own; use it for a few queues with a high load. max_payload_bytes (1
byte to 100 MB) limits the size of a payload or body. The delay after a failed attempt is backoff_base times
backoff_factor for each attempt after the first, at most backoff_max, minus a random fraction of up to backoff_jitter (0
to 1). If if_not_exists is true, an existing queue is returned unchanged. archive_for (1 day to 10 years) is the minimum
time for which acknowledged messages are kept in pgqueue.archived_messages; null keeps none. expires_after_idle (1 s to
10 years) is for temporary queues, such as one for the replies to one instance of a service. Such a queue is dropped, as
by drop_idle_queues, if it holds no message and no session has claimed, received or waited for this long. A later
create_queue of any queue drops it; if it is dedicated, the next call that creates or exposes a dedicated queue.
dedup_window (1 s to 30 days) is the time for which enqueue adds no second message with the same dedup_key; 0 means as
long as the first message lives, at most 30 days. With group_limit (1 to 1000) at most group_limit messages with the
same group_key are in flight at a time, in the order of their ids. If group_limit is 1, a message that waits for its
retry keeps the later ones of its group waiting. With on_dead skip a group goes on after one of its messages has become
a dead letter; with hold, which needs group_limit and dlq_enabled, the group waits until the dead letter is redriven or
purged. At most max_in_flight (1 to 10000) messages of the queue are in flight at a time, over all consumers. Claims and
receives take at most rate_limit (1 to 1000000) messages in each rate_period (1 ms to 1 day), and up to rate_limit more
that earlier claims have left. With priorities true, messages with a higher priority are claimed first; the queue cannot
have a group_limit then. counters false makes its calls faster, and stats returns null for its totals. dead_letter_to
names another queue, for which the caller needs admin access, too. That queue takes the dead letters and sends them as
new messages, when it is claimed or received from, or its relation is read; their header pgqueue.dead_letter has the
queue, id, reason, attempts and died_at of the dead letter. It needs dlq_enabled and on_dead skip. If a dump without
rows was restored, the queue takes over what is left of the former queue of this name: its dedicated table, the relation
of its transport, and the access of roles. Raises 22023, PQ002 if the queue exists, and PQ004 if a longer transaction
keeps a dedicated table from being attached.';

create or replace function pgqueue.alter_queue(
    queue_name pgqueue.queue_of_admin,
    visibility_timeout interval default null,
    max_attempts int default null,
    dlq_enabled boolean default null,
    dead_letter_expired boolean default null,
    max_payload_bytes int default null,
    backoff_base interval default null,
    backoff_factor double precision default null,
    backoff_max interval default null,
    backoff_jitter double precision default null,
    archive_for interval default null,
    expires_after_idle interval default null,
    dedup_window interval default null,
    group_limit int default null,
    on_dead text default null,
    max_in_flight int default null,
    rate_limit int default null,
    rate_period interval default null,
    counters boolean default null,
    dead_letter_to pgqueue.queue_of_admin default null,
    priorities boolean default null
) returns pgqueue.queue
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500 ms'
set jit = off as $$
declare
    q pgqueue.queues;
    before pgqueue.queues;
begin
    -- Not in a declaration: the handler below does not cover those.
    perform pgqueue._get_locked_queue(queue_name);
    select queues.* into before from pgqueue.queues where queues.name = queue_name collate "C" for no key update;
    perform pgqueue._require(coalesce(alter_queue.counters, true) or not before.counters, 'counters', 'false',
        format('true or null: calls use the counters of queue %L without a lock on the queue', before.name));
    update pgqueue.queues c
    set visibility_timeout = coalesce(alter_queue.visibility_timeout, c.visibility_timeout),
        max_attempts = case alter_queue.max_attempts when 0 then 2147483647 else coalesce(alter_queue.max_attempts, c.max_attempts) end,
        dlq_enabled = coalesce(alter_queue.dlq_enabled, c.dlq_enabled),
        dead_letter_expired = coalesce(alter_queue.dead_letter_expired, c.dead_letter_expired),
        max_payload_bytes = coalesce(alter_queue.max_payload_bytes, c.max_payload_bytes),
        backoff_base = coalesce(alter_queue.backoff_base, c.backoff_base),
        backoff_factor = coalesce(alter_queue.backoff_factor, c.backoff_factor),
        backoff_max = coalesce(alter_queue.backoff_max, c.backoff_max),
        backoff_jitter = coalesce(alter_queue.backoff_jitter, c.backoff_jitter),
        archive_for = nullif(coalesce(alter_queue.archive_for, c.archive_for), '0'),
        expires_after_idle = nullif(coalesce(alter_queue.expires_after_idle, c.expires_after_idle), '0'),
        dedup_window = coalesce(alter_queue.dedup_window, c.dedup_window),
        group_limit = nullif(coalesce(alter_queue.group_limit, c.group_limit), 0),
        on_dead = coalesce(alter_queue.on_dead, c.on_dead),
        max_in_flight = nullif(coalesce(alter_queue.max_in_flight, c.max_in_flight), 0),
        rate_limit = nullif(coalesce(alter_queue.rate_limit, c.rate_limit), 0),
        rate_period = coalesce(alter_queue.rate_period, c.rate_period),
        priorities = coalesce(alter_queue.priorities, c.priorities),
        counters = coalesce(alter_queue.counters, c.counters),
        -- The domain of the argument accepts no empty text from a role that has access to some queues only.
        dead_letter_to = nullif(coalesce(alter_queue.dead_letter_to::text, c.dead_letter_to) collate "C", c.name),
        updated_at = pgqueue._now()
    where c.name = queue_name collate "C"
    returning c.* into q;
    -- After the update, which has computed the new settings: an error undoes it.
    perform pgqueue._check_settings(q, on_dead, rate_period);
    perform pgqueue._raise_invalid(s.name, s.value,
        format('unchanged for the dedicated queue %L, whose table is made for its settings', q.name))
    from (
        values
        ('group_limit', coalesce(q.group_limit, 0)::text, (q.group_limit is null) <> (before.group_limit is null)),
        ('priorities', q.priorities::text, q.priorities <> before.priorities),
        ('max_in_flight', q.max_in_flight::text, q.max_in_flight is not null and before.max_in_flight is null)
    ) s (name, value, is_changed)
    where q.dedicated and s.is_changed;
    if q.kind is distinct from before.kind then
        q := pgqueue._change_kind(q);
    end if;
    -- The repair that doctor suggests relies on this.
    perform pgqueue._create_sequence(pgqueue._sequence_name(r, q.name)) from unnest(pgqueue._missing_counters(q.name)) as r
    where q.counters;
    perform pgqueue._call_queue_handlers(before, q);
    return pgqueue._public_queue(q);
exception when lock_not_available then
    perform pgqueue._raise('queue_busy', queue_name, 'alter_queue');
    return null;
end;
$$;
comment on function pgqueue.alter_queue is
'Changes the settings whose arguments are not null, and returns the queue. The limits are those of create_queue.
Messages keep the max_attempts with which they were sent. A new archive_for also applies to messages that are archived
already; a running transaction may not notice the change before it ends. archive_for 0 ends archiving, and archived
messages are kept for the time set before. expires_after_idle 0 means that the queue never expires. A new dedup_window
applies to messages that are sent from then on; the keys of earlier ones may be free at once. A new group_limit,
max_in_flight, rate_limit or rate_period applies to the next claims; group_limit 0, max_in_flight 0 and rate_limit 0 end
these limits. To give a queue its first group_limit, max_in_flight or priorities, or to take the last away, moves all
its messages to another table in one transaction. Other calls of this queue wait meanwhile, one to three seconds for
100,000 messages; claims stay valid, and other queues are not affected. A dedicated queue keeps what it was created
with; only max_in_flight can end, for good. A queue that has a stream gets no priorities, max_in_flight and rate_limit:
stream_claim would refuse it, and the open batch would be delivered again. counters true begins to count; a queue that
has counters keeps them. A new dead_letter_to applies also to the dead letters that the queue has; the name of the queue
itself ends it, and the dead letters stay. Raises 22023, PQ001, and PQ004 if a longer transaction has altered the queue
or uses it while messages would be moved, or if archiving would begin or end for the relation of a transport while a
longer transaction uses that relation.';

create or replace function pgqueue.get_queue(queue_name pgqueue.queue_of_any_access) returns pgqueue.queue
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    return pgqueue._public_queue(pgqueue._get_unlocked_queue(queue_name));
end;
$$;
comment on function pgqueue.get_queue is
'Returns a queue with its settings. Raises PQ001.';

create or replace function pgqueue.list_queues(caller pgqueue.caller default current_user) returns setof pgqueue.queue
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    return query
    select l.*
    from pgqueue.queues q cross join lateral pgqueue._public_queue(q) l
    where pgqueue._may_use(caller, q.name, pgqueue._privileges_of('{producer,consumer,admin,raw,reader}'))
    order by q.name;
end;
$$;
comment on function pgqueue.list_queues is
'Returns the queues of the caller with their settings, by name: all of them, or those for which the caller has access.';

create or replace function pgqueue.pause_queue(queue_name pgqueue.queue_of_admin) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    perform pgqueue._get_locked_queue(queue_name);
    -- The row is locked even if nothing changes: if it was changed after a fixed snapshot, this statement fails.
    perform from pgqueue.queues where queues.name = queue_name collate "C" for no key update;
    update pgqueue.queues
    set paused_at = pgqueue._now(), updated_at = pgqueue._now()
    where queues.name = queue_name collate "C" and queues.paused_at is null;
    return found;
end;
$$;
comment on function pgqueue.pause_queue is
'Pauses a queue: claim, exchange, receive and stream_claim return no messages until resume_queue. Messages can still be
sent, acknowledged and returned. Returns false if the queue was paused already. Waits for a transaction that has changed
the queue. Raises PQ001.';

create or replace function pgqueue.resume_queue(queue_name pgqueue.queue_of_admin) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    q pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    resumed boolean;
begin
    perform from pgqueue.queues where queues.name = queue_name collate "C" for no key update;
    update pgqueue.queues
    set paused_at = null, updated_at = pgqueue._now()
    where queues.name = queue_name collate "C" and queues.paused_at is not null;
    resumed := found;
    perform pg_notify(pgqueue.channel(q.name), '');
    return resumed;
end;
$$;
comment on function pgqueue.resume_queue is
'Ends the pause of a queue and notifies waiting consumers. Returns false if the queue was not paused. Waits as
pause_queue does. Raises PQ001.';
