-- Finds messages by their ids. Functions that do so have enable_seqscan and enable_bitmapscan off and force generic
-- plans, and write `from pgqueue._lookup_keys(name, ids) k where pgqueue._matches_key(m.queue_name, m.id, name,
-- k.names, k.ids, k.id)`. Both are inlined to `m.queue_name = name and m.id = any (ids)`. A bitmap that exceeds
-- work_mem would compare each row with each id, which takes hours for millions of messages. Before PostgreSQL 17, a
-- plan for constants could read the whole queue.

-- Before PostgreSQL 17, a plan that was made while a queue was small may read the whole queue with `id = any` as a
-- filter, and the session keeps that plan. In those versions a join looks up each id instead. The name is compared
-- with an array, so the planner gains nothing by reading the whole index in order. The calling functions disable other
-- scans. _lookup_keys returns one row with all ids or, in those versions, one row per id, in order.
create or replace function pgqueue._install_key_lookup() returns void
language plpgsql volatile as $$
declare
    joins constant boolean := current_setting('server_version_num')::int < 170000;
begin
    execute format(
        'create or replace function pgqueue._lookup_keys(queue_name text, inout ids bigint[], out id bigint, out names text[])'
        ' returns setof record language sql immutable parallel safe as %L',
        case when joins then ' select null::bigint[], i, array[queue_name] from unnest(ids) as i order by i '
            else ' select ids, null::bigint, null::text[] ' end);
    execute format(
        'create or replace function pgqueue._matches_key('
        'queue_name text, id bigint, name text, key_names text[], key_ids bigint[], key_id bigint)'
        ' returns boolean language sql immutable parallel safe as %L',
        case when joins then
            ' select queue_name = any (key_names) and id = key_id '
            else ' select queue_name = name and id = any (key_ids) ' end);
end;
$$;

do $$ begin perform pgqueue._install_key_lookup(); end $$;

-- Whether a message belongs to the queue of this kind and name, in a form that only the further indexes of the kind
-- have. A search by _group_position or _level_position finds the messages in the order of its index. An `order by`
-- would sort all messages: the planner cannot know that only the partition with this index is left at run time.
-- Inlined.
create or replace function pgqueue._is_in_queue(m pgqueue.messages, kind bigint, name text) returns boolean
language sql immutable parallel safe as $$ select m.kind = _is_in_queue.kind and m.queue_name || '' = name $$;

-- In PL/pgSQL, which keeps its plan: see _level_registers.
create or replace function pgqueue._array_except(ids bigint[], others bigint[]) returns bigint[]
language plpgsql immutable parallel safe as $$
begin
    return array(select unnest(ids) except select unnest(others) order by 1);
end;
$$;

-- Whether a claim may return the message. A visible message that is not ready is spent: it has expired or has no
-- attempt left. Inlined.
create or replace function pgqueue._is_ready(m pgqueue.messages, at timestamptz) returns boolean
language sql immutable parallel safe as $$
    select m.visible_at <= at and m.attempt_count < m.max_attempts and (m.expires_at is null or m.expires_at > at)
$$;

-- Statements that name messages_shared call this form: PostgreSQL would build the row for the other one.
create or replace function pgqueue._is_ready(m pgqueue.messages_shared, at timestamptz) returns boolean
language sql immutable parallel safe as $$
    select m.visible_at <= at and m.attempt_count < m.max_attempts and (m.expires_at is null or m.expires_at > at)
$$;

-- Whether the claim with this token is the latest claim of the message, counting also claims without a token. Inlined.
create or replace function pgqueue._is_claimed_by(m pgqueue.messages, claim_token uuid) returns boolean
language sql immutable parallel safe
as $$ select m.claim_token = _is_claimed_by.claim_token and m.claimed_attempt = m.attempt_count $$;

create or replace function pgqueue._is_claimed_by(m pgqueue.messages_shared, claim_token uuid) returns boolean
language sql immutable parallel safe
as $$ select m.claim_token = _is_claimed_by.claim_token and m.claimed_attempt = m.attempt_count $$;

-- Whether a message that is not visible waits for its time or for its retry. Otherwise a consumer has it. Inlined.
create or replace function pgqueue._is_unclaimed(m pgqueue.messages) returns boolean
language sql immutable parallel safe
as $$ select m.attempt_count = 0 or (m.claim_token is null and m.claimed_attempt = m.attempt_count) $$;

-- Returns for each claim whether it is valid, and the ids of the messages of valid ones, which it locks in the order of
-- their ids. A claim that is given twice has the same answer twice.
create or replace function pgqueue._lock_claims(
    q pgqueue.queues, ids bigint[], claim_tokens uuid[], out held boolean[], out held_ids bigint[]
)
language plpgsql volatile as $$
begin
    if ids is null or (select bool_or(i is null) from unnest(ids) as i) then
        perform pgqueue._raise_invalid('ids', ids::text, 'an array of ids of claimed messages, without nulls');
    end if;
    if claim_tokens is null or cardinality(claim_tokens) <> cardinality(ids)
        or (select bool_or(t is null) from unnest(claim_tokens) as t)
    then
        perform pgqueue._raise_invalid('claim_tokens', claim_tokens::text,
            format('an array with the claim_token of each of the %s, without nulls', pgqueue._with_number(cardinality(ids), 'id')));
    end if;
    -- A subquery with a locking clause is searched once for each claim, in the order of the ids, by any plan.
    if q.kind is not null then
        held := array(
            select m.id is not null
            from (
                select u.* from unnest(ids, claim_tokens) with ordinality as u (id, claim_token, place) order by u.id
            ) c
            left join lateral (
                select l.id from pgqueue.messages l
                where l.kind = q.kind and l.queue_name = q.name and l.id = c.id and pgqueue._is_claimed_by(l, c.claim_token)
                for update
            ) m on true
            order by c.place
        );
    else
        held := array(
            select m.id is not null
            from (
                select u.* from unnest(ids, claim_tokens) with ordinality as u (id, claim_token, place) order by u.id
            ) c
            left join lateral (
                select l.id from pgqueue.messages_shared l
                where l.queue_name = q.name and l.id = c.id and pgqueue._is_claimed_by(l, c.claim_token)
                for update
            ) m on true
            order by c.place
        );
    end if;
    held_ids := array(select distinct u.id from unnest(ids, held) as u (id, is_held) where u.is_held order by 1);
end;
$$;
