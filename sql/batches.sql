-- The batches of streams. A stream reserves messages under a batch number and a token, which the reader stores in its
-- checkpoint. After a crash the reader gets the same messages again, until it acknowledges the batch.

create or replace function pgqueue._check_batch(s pgqueue.streams, epoch bigint, seq bigint, claim_token uuid)
returns void language plpgsql stable as $$
begin
    perform pgqueue._check_epoch(s, epoch);
    perform pgqueue._require(seq >= 1, 'seq', seq::text, 'the number of a batch, 1 or higher');
    perform pgqueue._require(claim_token is not null, 'claim_token', null, 'the claim_token that stream_claim returned');
    if seq <> s.acked_seq + 1 or s.claim_token is distinct from _check_batch.claim_token then
        perform pgqueue._raise_stream('out_of_step', s, seq);
    end if;
end;
$$;

create or replace function pgqueue._public_batch(s pgqueue.streams, lost bigint[]) returns pgqueue.stream_batch
language sql stable as $$
    select row(
        s.queue_name, s.stream_name, s.acked_seq + 1, s.claim_token, cardinality(s.ids) - cardinality(s.left_out),
        s.partitions, s.replays, s.claimed_at, s.claimed_until, lost
    )::pgqueue.stream_batch
$$;

-- Extends the claims of the open batch to the given time, including claims that ran out if no other session has claimed
-- the message since. Returns the ids of the messages that are lost.
create or replace function pgqueue._extend_open_batch(q pgqueue.queues, s pgqueue.streams, until timestamptz)
returns bigint[] language plpgsql volatile as $$
declare
    kept bigint[];
begin
    with extended as (
        update pgqueue.messages m
        set visible_at = case when m.visible_at <= until or pgqueue._wake_if_waiting(q, pgqueue._now()) is not null then until end
        from pgqueue._lookup_keys(s.queue_name, s.ids) k
        where (m.kind = q.kind or m.kind is null)
            and pgqueue._matches_key(m.queue_name, m.id, s.queue_name, k.names, k.ids, k.id)
            and pgqueue._is_claimed_by(m, s.claim_token)
        returning m.id
    )
    select coalesce(array_agg(e.id), '{}'::bigint[]) into kept from extended e;
    if cardinality(kept) = cardinality(s.ids) - cardinality(s.left_out) then
        return '{}'::bigint[];
    end if;
    return pgqueue._array_except(s.ids, s.left_out || kept);
end;
$$;

create or replace function pgqueue._ack_open_batch(s pgqueue.streams) returns int
language plpgsql volatile as $$
declare
    acked int;
begin
    if s.on_ack = 'archive'
        or s.on_ack is null and (select q.archive_for is not null from pgqueue.queues q where q.name = s.queue_name)
    then
        acked := cardinality(pgqueue._ack_to_archive(s.queue_name, s.ids, s.claim_token));
    else
        delete from pgqueue.messages m
        using pgqueue._lookup_keys(s.queue_name, s.ids) k
        where (m.kind = (select q.kind from pgqueue.queues q where q.name = s.queue_name) or m.kind is null)
            and pgqueue._matches_key(m.queue_name, m.id, s.queue_name, k.names, k.ids, k.id)
            and pgqueue._is_claimed_by(m, s.claim_token);
        get diagnostics acked = row_count;
    end if;
    update pgqueue.streams t
    set acked_seq = s.acked_seq + 1, acked_token = s.claim_token, claim_token = null, ids = null, left_out = null,
        partitions = null, visibility_timeout = null, claimed_at = null, claimed_until = null, replays = null,
        begun_epoch = null
    where t.queue_name = s.queue_name and t.stream_name = s.stream_name;
    return pgqueue._count('acknowledged', s.queue_name, acked);
end;
$$;

create or replace function pgqueue._save_batch(s pgqueue.streams) returns void
language plpgsql volatile as $$
begin
    update pgqueue.streams t
    set epoch = s.epoch, claim_token = s.claim_token, ids = s.ids, left_out = s.left_out, partitions = s.partitions,
        visibility_timeout = s.visibility_timeout, claimed_at = s.claimed_at, claimed_until = s.claimed_until,
        replays = s.replays, begun_epoch = s.begun_epoch
    where t.queue_name = s.queue_name and t.stream_name = s.stream_name;
end;
$$;

create or replace function pgqueue._claim_batch(
    q pgqueue.queues, s pgqueue.streams, max_messages int, visibility_timeout interval, max_bytes bigint
) returns pgqueue.streams
language plpgsql volatile as $$
declare
    token constant uuid := gen_random_uuid();
    span constant interval := coalesce(visibility_timeout, q.visibility_timeout);
    -- Each search compares the ids that it finds with those of its portion.
    portion int := case when max_bytes is null then 10000 else 10 end;
    wanted int;
    found_ids bigint[];
    ids bigint[] := '{}'::bigint[];
    until timestamptz;
    first_until timestamptz;
    portion_bytes bigint;
    bytes bigint := 0;
begin
    loop
        wanted := least(max_messages - cardinality(ids), portion);
        exit when wanted = 0;
        found_ids := (pgqueue._lock_candidates(q.name, wanted, visibility_timeout)).ids;
        if found_ids <> '{}' then
            -- claim has a similar update. Here it runs for several portions of ids, and all get the token of the batch.
            until := pgqueue._add_interval(pgqueue._now(), span);
            with claimed as (
                update pgqueue.messages m
                set visible_at = until, attempt_count = m.attempt_count + 1, claimed_attempt = m.attempt_count + 1,
                    claim_token = token, claimed_by = 'stream ' || s.stream_name, claimed_at = pgqueue._now()
                from pgqueue._lookup_keys(q.name, found_ids) k
                where (m.kind = q.kind or m.kind is null)
                    and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
                returning case when max_bytes is not null then coalesce(pg_column_size(m.payload), pg_column_size(m.body)) end as size
            )
            select coalesce(sum(c.size), 0) into portion_bytes from claimed c;
            ids := ids || found_ids;
            bytes := bytes + portion_bytes;
            first_until := coalesce(first_until, until);
        end if;
        exit when cardinality(found_ids) < wanted or bytes >= max_bytes;
        if max_bytes is not null then
            -- As many as fit, if they are as large as those before.
            portion := greatest(least((max_bytes - bytes) / greatest(bytes / cardinality(ids), 1), 10000), 1);
        end if;
    end loop;
    if ids <> '{}' then
        s.claim_token := token;
        s.ids := pgqueue._array_except(ids, '{}');
        s.left_out := '{}';
        s.visibility_timeout := span;
        s.claimed_at := pgqueue._now();
        s.claimed_until := first_until;
        s.replays := 0;
    end if;
    return s;
end;
$$;

create or replace function pgqueue.stream_claim(
    queue_name pgqueue.queue_of_consumer,
    stream_name text,
    epoch bigint,
    after_seq bigint,
    after_token uuid,
    max_messages int default 10000,
    partitions int default 1,
    visibility_timeout interval default null,
    max_bytes bigint default null
) returns setof pgqueue.stream_batch
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    s pgqueue.streams := pgqueue._lock_stream(queue_name, stream_name);
    lost bigint[];
begin
    perform pgqueue._check_epoch(s, epoch);
    perform pgqueue._require(after_seq >= 0, 'after_seq', after_seq::text,
        'the number of the last finished batch, or 0 before the first');
    perform pgqueue._require(max_messages between 1 and 100000, 'max_messages', max_messages::text, 'an integer from 1 to 100000');
    perform pgqueue._require(partitions between 1 and 1000, 'partitions', partitions::text, 'an integer from 1 to 1000');
    perform pgqueue._check_visibility_timeout(visibility_timeout);
    perform pgqueue._require(max_bytes is null or max_bytes >= 1, 'max_bytes', max_bytes::text,
        'an integer from 1, or null for no limit');
    perform pgqueue._require(not q.priorities and coalesce(q.max_in_flight, q.rate_limit) is null, 'queue_name', q.name,
        'a queue without priorities, max_in_flight and rate_limit: a batch has all ready messages by id, up to max_messages');

    if after_seq = s.acked_seq + 1 and after_token = s.claim_token then
        perform pgqueue._ack_open_batch(s);
        s := pgqueue._lock_stream(queue_name, stream_name);
    elsif after_seq <> s.acked_seq or after_token is distinct from s.acked_token then
        perform pgqueue._raise_stream('out_of_step', s, after_seq);
    elsif s.claim_token is not null then
        -- The reader crashed before it stored the batch in its checkpoint, or the answer was lost. Return the open
        -- batch without the messages that other sessions have claimed since. Its attempt is already counted.
        s.claimed_until := pgqueue._add_interval(pgqueue._now(), coalesce(visibility_timeout, s.visibility_timeout));
        lost := pgqueue._extend_open_batch(q, s, s.claimed_until);
        s.left_out := s.left_out || lost;
        perform pgqueue._save_batch(s);
        return next pgqueue._public_batch(s, lost);
        return;
    end if;

    s := pgqueue._claim_batch(q, s, max_messages, visibility_timeout, max_bytes);
    if s.claim_token is not null then
        s.partitions := partitions;
        perform pgqueue._save_batch(s);
        return next pgqueue._public_batch(s, '{}');
    end if;
end;
$$;
comment on function pgqueue.stream_claim is
'Acknowledges all batches up to after_seq with token after_token (0 and null before the first), whose results must be
stored durably, and returns the next batch: the open one, with the same messages, or a new one. Messages of the open
batch that the stream has lost are left out and returned as lost; if none is left, the batch is empty. A new batch has
up to max_messages (1 to 100000, default 10000) ready messages, claimed for visibility_timeout as by claim; no row is
returned if none are ready or the queue is paused. The batch is read in partitions (1 to 1000, default 1). It ends
earlier if its payloads and bodies have about max_bytes bytes, as stored; the default, null, is no limit, and up to 10
messages are taken of any size. If after_seq and after_token are not those of the stream, the checkpoint was rolled
back, copied or taken from another stream: this raises PQ007. Raises 22023, PQ001, PQ005, PQ006, PQ007.';

create or replace function pgqueue.stream_begin(
    queue_name pgqueue.queue_of_consumer,
    stream_name text,
    epoch bigint,
    seq bigint,
    claim_token uuid,
    max_replays int default 5
) returns pgqueue.stream_batch
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    s pgqueue.streams := pgqueue._lock_stream(queue_name, stream_name);
    at constant timestamptz := pgqueue._now();
    lost bigint[];
begin
    perform pgqueue._require(max_replays is null or max_replays >= 0, 'max_replays', max_replays::text,
        'an integer from 0, or null for no limit');
    perform pgqueue._check_batch(s, epoch, seq, claim_token);
    -- A batch that was claimed just now is not checked. If messages are missing nevertheless, stream_read notices.
    if s.begun_epoch is not null or s.claimed_until < pgqueue._add_interval(at, s.visibility_timeout / 2) then
        s.claimed_until := pgqueue._add_interval(at, s.visibility_timeout);
        lost := pgqueue._extend_open_batch(q, s, s.claimed_until);
        if lost <> '{}' then
            perform pgqueue._raise_stream('data_lost', s, seq, lost);
        end if;
    end if;
    -- Count one replay per epoch, however often the reader begins the batch in it. Replays of an empty batch do not
    -- count.
    if s.begun_epoch <> epoch and cardinality(s.left_out) < cardinality(s.ids) then
        if s.replays >= max_replays then
            perform pgqueue._raise_stream('poisoned', s, seq);
        end if;
        s.replays := s.replays + 1;
    end if;
    s.begun_epoch := epoch;
    perform pgqueue._save_batch(s);
    return pgqueue._public_batch(s, '{}');
end;
$$;
comment on function pgqueue.stream_begin is
'Begins to read the open batch, for the first time or again after a crash, and returns it. Call this before reading its
partitions. Reading a batch again renews its reservation. Messages that the stream has lost, because the reservation ran
out and other sessions claimed them, raise PQ008, which names them. A batch that was begun in max_replays + 1 epochs
(default 5; null for no limit) raises PQ009, which names the batch and its messages. A batch that is not the open one
raises PQ007. Raises 22023, PQ001, PQ005, PQ006, PQ007, PQ008, PQ009.';

create or replace function pgqueue.stream_read(
    queue_name pgqueue.queue_of_consumer, stream_name text, epoch bigint, seq bigint, claim_token uuid,
    partition int default null
) returns setof pgqueue.message
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_unlocked_queue(queue_name);
    s pgqueue.streams;
    wanted bigint[];
    n bigint;
begin
    -- Without the locks, the tables look empty if a compaction ends between a snapshot and the read.
    lock table pgqueue.streams, pgqueue.messages in access share mode;
    perform pgqueue._require_untruncated('{pgqueue.streams,pgqueue.messages}');
    select t.* into s from pgqueue.streams t
    where t.queue_name = q.name and t.stream_name = stream_read.stream_name collate "C";
    if not found then
        perform pgqueue._raise('stream_not_found', stream_name, queue_name);
    end if;
    perform pgqueue._check_batch(s, epoch, seq, claim_token);
    wanted := s.ids;
    if partition is not null then
        perform pgqueue._require(partition between 0 and s.partitions - 1, 'partition', partition::text,
            format('an integer from 0 to %s, or null for all', s.partitions - 1));
        n := cardinality(s.ids);
        wanted := s.ids[n * partition / s.partitions + 1 : n * (partition + 1) / s.partitions];
    end if;
    if s.left_out <> '{}' then
        wanted := pgqueue._array_except(wanted, s.left_out);
    end if;
    return query
    select
        m.id, m.queue_name, m.payload, m.body, m.headers, m.message_id, m.attempt_count, m.max_attempts,
        m.enqueued_at, m.visible_at, m.expires_at, m.claimed_by, m.claim_token, m.last_error
    from pgqueue.messages m, pgqueue._lookup_keys(q.name, wanted) k
    -- The kind of the queue may have changed: it is read in the snapshot of the messages.
    where (m.kind = (select c.kind from pgqueue.queues c where c.name = q.name) or m.kind is null)
        and pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
        and pgqueue._is_claimed_by(m, s.claim_token);
    get diagnostics n = row_count;
    if n < cardinality(wanted) then
        -- The batch may have been acknowledged or skipped since.
        perform pgqueue._check_batch(t, stream_read.epoch, seq, stream_read.claim_token) from pgqueue.streams t
        where t.queue_name = q.name and t.stream_name = s.stream_name;
        perform pgqueue._raise_stream('data_lost', s, seq, pgqueue._array_except(wanted, array(
            select m.id from pgqueue.messages m, pgqueue._lookup_keys(q.name, wanted) k
            where pgqueue._matches_key(m.queue_name, m.id, q.name, k.names, k.ids, k.id)
                and pgqueue._is_claimed_by(m, s.claim_token))));
    end if;
end;
$$;
comment on function pgqueue.stream_read is
'Returns the messages of one partition of the open batch, numbered from 0, or of all partitions if partition is null, in
the order of their ids; each partition is a contiguous range of the batch. It changes nothing, may be called repeatedly
and in parallel, and returns the same messages each time, except for visible_at. It never returns fewer messages: lost
messages raise PQ008, and a batch that is not the open one raises PQ007. Raises 22023, PQ001, PQ005, PQ006, PQ007,
PQ008.';

create or replace function pgqueue.stream_extend(
    queue_name pgqueue.queue_of_consumer, stream_name text, epoch bigint, visibility_timeout interval default null
) returns setof pgqueue.stream_batch
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    s pgqueue.streams := pgqueue._lock_stream(queue_name, stream_name);
    lost bigint[];
begin
    perform pgqueue._check_epoch(s, epoch);
    perform pgqueue._check_visibility_timeout(visibility_timeout);
    if s.claim_token is null then
        return;
    end if;
    s.claimed_until := pgqueue._add_interval(pgqueue._now(), coalesce(visibility_timeout, s.visibility_timeout));
    lost := pgqueue._extend_open_batch(q, s, s.claimed_until);
    perform pgqueue._save_batch(s);
    return next pgqueue._public_batch(s, lost);
end;
$$;
comment on function pgqueue.stream_extend is
'Sets the end of the open batch''s reservation to visibility_timeout (1 s to 43200 s, default that of its claim) from
now. Returns the batch, with the ids of the messages that the stream has lost as lost; no row if no batch is open.
Readers call this periodically as a heartbeat. Raises 22023, PQ001, PQ005, PQ006.';

create or replace function pgqueue.stream_ack(
    queue_name pgqueue.queue_of_consumer, stream_name text, epoch bigint, seq bigint, claim_token uuid
) returns int
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    s pgqueue.streams;
begin
    perform pgqueue._get_locked_queue(queue_name);
    s := pgqueue._lock_stream(queue_name, stream_name);
    perform pgqueue._check_epoch(s, epoch);
    if seq < s.acked_seq or seq = s.acked_seq and s.acked_token = stream_ack.claim_token then
        return 0;
    end if;
    perform pgqueue._check_batch(s, epoch, seq, claim_token);
    return pgqueue._ack_open_batch(s);
end;
$$;
comment on function pgqueue.stream_ack is
'Acknowledges the open batch, whose results must be stored durably, and returns how many of its messages the stream
still held; 0 if the batch was acknowledged before. A batch that was never claimed, or whose token differs, raises
PQ007. Raises 22023, PQ001, PQ005, PQ006, PQ007.';

create or replace function pgqueue.stream_skip(
    queue_name pgqueue.queue_of_consumer_or_admin,
    stream_name text,
    seq bigint,
    ids bigint[] default null,
    error text default null,
    epoch bigint default null
) returns int
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
    s pgqueue.streams := pgqueue._lock_stream(queue_name, stream_name);
    at constant timestamptz := pgqueue._now();
    wanted bigint[];
    m pgqueue.messages;
    skipped int := 0;
begin
    perform pgqueue._check_batch(s, coalesce(epoch, s.epoch), seq, coalesce(s.claim_token, gen_random_uuid()));
    wanted := pgqueue._array_except(s.ids, s.left_out);
    if stream_skip.ids is not null then
        wanted := pgqueue._array_except(wanted, pgqueue._array_except(wanted, stream_skip.ids));
    end if;
    for m in select d.* from pgqueue._delete_messages(q.name, q.kind, wanted, s.claim_token) d loop
        perform pgqueue._retry_or_dead_letter(
            q, m, at, null,
            coalesce(error, format('skipped with batch %s of stream %s after %s', seq, s.stream_name, pgqueue._with_number(s.replays, 'replay'))),
            null, 'rejected');
        skipped := skipped + 1;
    end loop;
    -- The remaining messages may be replayed max_replays times again. Without an epoch argument the caller is not the
    -- reader: a new epoch fences the reader, which does not know that the batch has changed.
    s.left_out := s.left_out || wanted;
    s.replays := 0;
    if epoch is null then
        s.epoch := pgqueue._next_epoch(s.epoch);
    end if;
    perform pgqueue._save_batch(s);
    return skipped;
end;
$$;
comment on function pgqueue.stream_skip is
'Removes messages, all or those in ids, from the open batch, whose number is seq. Returns how many went to the dead
letters, with reason rejected and error as last_error, or were deleted if the queue has no dead letters. Messages that
the stream has lost are left out as well. The batch continues with the remaining messages and its replay count starts
over; if none remain, it is read as an empty batch. An operator calls this without epoch, which fences the reader:
restart its query. A reader that skips messages it cannot use passes its own epoch. Raises 22023, PQ001, PQ005, PQ006,
and PQ007 if the batch is not open.';
