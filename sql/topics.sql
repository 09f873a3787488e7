-- Publish and subscribe. Queues subscribe to topics, and publish sends a copy of a message to each subscribed queue, in
-- the caller's transaction. The consumers of one queue share its copy.

create or replace function pgqueue._is_topic(topic text, may_be_pattern boolean) returns boolean
language sql immutable parallel safe as $$
    -- A word may contain all characters that a type name may contain. * and # are wildcards only as a whole word.
    select char_length(topic) between 1 and 255 and topic !~ '(^|[.])([.]|$)|[[:cntrl:]]|(^|[.])#[.]#([.]|$)'
        and (may_be_pattern or topic !~ '(^|[.])[*#]([.]|$)')
$$;

create or replace function pgqueue._check_topic(argument text, topic text, may_be_pattern boolean) returns void
language plpgsql stable as $$
begin
    if pgqueue._is_topic(topic, may_be_pattern) is not true then
        perform pgqueue._raise_invalid(argument, topic,
            '1 to 255 characters: words joined by dots, not empty, without control characters'
            || case when may_be_pattern then '; the word * matches one word, # matches any number of words, and no # follows another #'
                else '; * and # are allowed only in subscriptions' end);
    end if;
end;
$$;

create or replace function pgqueue._subscribers(topics text[]) returns text[]
language plpgsql stable as $$
declare
    topic text;
    word text;
    -- The prefixes of patterns that match the words read so far. Each word has a dot behind it.
    prefixes text[];
    patterns text[] := '{}'::text[];
begin
    foreach topic in array topics loop
        prefixes := '{"",#.}'::text[];
        -- Walk the index on the patterns as a tree: look up each prefix extended by the next word and by *, each alone
        -- and followed by #. A prefix that ends in # matches this word, too. So the cost depends on the topic and on
        -- the matching patterns, not on the number of subscriptions.
        foreach word in array string_to_array(topic, '.') loop
            prefixes := array(
                select c.prefix
                from unnest(prefixes) as b
                cross join lateral (values
                    (b || word || '.'), (b || word || '.#.'), (b || '*.'), (b || '*.#.')
                ) as c (prefix)
                where (
                    -- The character after "." is "/": this range contains all patterns with the prefix.
                    select true from pgqueue.subscriptions s
                    where s.is_pattern and (s.topic || '.') >= c.prefix and (s.topic || '.') < left(c.prefix, -1) || '/'
                    order by s.topic || '.' limit 1
                )
                union
                select b from unnest(prefixes) as b where '.' || b like '%.#.'
            );
            exit when prefixes = '{}'::text[];
        end loop;
        patterns := patterns || prefixes;
    end loop;
    return array(
        select s.queue_name from pgqueue.subscriptions s where s.topic = any (topics)
        union
        select s.queue_name from pgqueue.subscriptions s where s.is_pattern and (s.topic || '.') = any (patterns)
    );
end;
$$;

create or replace function pgqueue.subscribe(topic text, queue_name pgqueue.queue_of_consumer_or_admin) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
begin
    perform pgqueue._check_topic('topic', topic collate "default", true);
    insert into pgqueue.subscriptions (topic, queue_name, endpoint, queue_address)
    -- The endpoint is not the plain queue name: a transport may have an endpoint with the name of another queue.
    values (subscribe.topic, q.name, 'pgqueue:' || q.name, q.name)
    on conflict do nothing;
    return found;
end;
$$;
comment on function pgqueue.subscribe is
'Subscribes the queue to topic and returns true; false if it is already subscribed. The queue gets a copy of each
message that is published to topic from now on. topic is 1 to 255 characters: words joined by dots. In place of a word,
* matches exactly one word and # any number of words, including none: orders.* matches orders.paid, and orders.# also
matches orders and orders.paid.late. A queue that several subscriptions match gets one copy. Endpoints of an NServiceBus
transport find the subscription if the queue has a relation of expose_transport and topic is not a pattern. Raises
22023, PQ001.';

create or replace function pgqueue.unsubscribe(topic text, queue_name pgqueue.queue_of_consumer_or_admin)
returns boolean language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    perform pgqueue._check_topic('topic', topic collate "default", true);
    perform pgqueue._get_locked_queue(queue_name);
    delete from pgqueue.subscriptions s
    where s.topic = unsubscribe.topic collate "C" and s.queue_name = unsubscribe.queue_name collate "C";
    return found;
end;
$$;
comment on function pgqueue.unsubscribe is
'Ends the subscription of the queue to exactly this topic or pattern and returns true; false if there was none. Messages
that were published before stay in the queue. Raises 22023, PQ001.';

create or replace function pgqueue.list_subscriptions(
    queue_name pgqueue.queue_of_consumer_or_admin default null, caller pgqueue.caller default current_user
) returns setof pgqueue.subscription
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    if queue_name is not null then
        perform pgqueue._get_unlocked_queue(queue_name);
    end if;
    return query
    -- A queue can be subscribed by subscribe, and also as the address of endpoints.
    select s.topic, s.queue_name, min(s.subscribed_at) from pgqueue.subscriptions s
    where (list_subscriptions.queue_name is null or s.queue_name = list_subscriptions.queue_name collate "C")
        and pgqueue._may_use(caller, s.queue_name, pgqueue._privileges_of('{consumer,admin}'))
    group by s.topic, s.queue_name
    order by s.topic, s.queue_name;
end;
$$;
comment on function pgqueue.list_subscriptions is
'Returns the subscriptions of a queue, or of all queues if queue_name is null, by topic and queue. Each is returned
once, with the time when it was first made, whether by subscribe or by endpoints of a transport. Raises PQ001.';

create or replace function pgqueue._check_copies(
    names text[], payload jsonb, delay interval, headers jsonb, expires_in interval, body bytea, dedup_key text,
    on_duplicate text
) returns void
language plpgsql stable as $$
declare
    smallest pgqueue.queues;
begin
    select * into smallest from pgqueue.queues q where q.name = any (names) order by q.max_payload_bytes limit 1;
    smallest.name := coalesce(smallest.name, '');
    perform pgqueue._check_enqueue(delay, expires_in), pgqueue._check_content(smallest, payload, body, headers);
    if dedup_key is not null or on_duplicate is distinct from 'keep' then
        perform pgqueue._check_keys(array[dedup_key], null, null, on_duplicate);
    end if;
end;
$$;

create or replace function pgqueue.publish(
    topic text,
    payload jsonb default null,
    delay interval default '0',
    headers jsonb default null,
    expires_in interval default null,
    message_id uuid default null,
    body bytea default null,
    base_topics text[] default null,
    dedup_key text default null,
    on_duplicate text default 'keep',
    group_key text default null,
    priority int default null,
    caller pgqueue.caller default current_user
) returns int
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    at constant timestamptz := pgqueue._now();
    topics text[] collate "C" := array[topic];
    names text[] collate "C";
    queue_ids bigint[];
    smallest pgqueue.queues;
    sent int;
begin
    if pgqueue._is_topic(topic collate "default", false) is not true then
        perform pgqueue._check_topic('topic', topic collate "default", false);
    end if;
    if base_topics is not null then
        perform pgqueue._check_topic('base_topics', t collate "default", false) from unnest(base_topics) as t;
        topics := topics || array(select unnest(base_topics));
    end if;
    -- Lock one queue after the other, by name. After waiting for a drop_queue, the queue may be gone, or a new queue of
    -- the same name may exist, with other subscriptions: queue_id tells them apart in the statements below.
    select array_agg(f.name) filter (where pgqueue._lock_queue(f.name)), array_agg(f.queue_id), min(f.max_payload_bytes)
    into names, queue_ids, smallest.max_payload_bytes
    from (
        select q.name, q.queue_id, q.max_payload_bytes from pgqueue.queues q
        where q.name = any (case
                when exists (select from pgqueue.subscriptions s where s.is_pattern) then pgqueue._subscribers(topics)
                else array(select s.queue_name from pgqueue.subscriptions s where s.topic = any (topics))
            end)
            -- The first condition is the cheaper one.
            and (
                has_table_privilege(caller, 'pgqueue.access_any'::regclass, pgqueue._privileges_of('{producer}'))
                or pgqueue._may_use(caller, q.name, pgqueue._privileges_of('{producer}'))
            )
        order by q.name offset 0
    ) f;
    if group_key is not null or priority is not null then
        perform pgqueue._check_keys(null, array[group_key], array[priority]);
        headers := pgqueue._with_group_and_priority(headers, group_key, priority);
    end if;
    if headers is null then
        headers := jsonb_build_object('pgqueue.topic', topic);
    elsif jsonb_typeof(headers) = 'object' then
        headers := headers || jsonb_build_object('pgqueue.topic', topic);
    end if;
    -- What the fast path of enqueue would send needs no other check.
    if delay is distinct from interval '0' or dedup_key is not null or on_duplicate is distinct from 'keep'
        or pgqueue._is_valid(smallest, payload, headers, expires_in, body) is not true or pgqueue._has_fixed_snapshot()
    then
        perform pgqueue._check_copies(names, payload, delay, headers, expires_in, body, dedup_key, on_duplicate);
        -- pg_relation_size does not depend on the snapshot, and locks the register: the catalog cache can be stale.
        perform pgqueue._raise('stale_snapshot', format('queue %L', q.name))
        from pgqueue.queues q
        where q.name = any (names) and pgqueue._has_fixed_snapshot() and pg_relation_size(q.fresh_from_id) is null
            -- It was not dropped, but got new registers with another kind.
            and to_regclass(format('pgqueue.queue_%s_fresh_from_id', q.queue_id)) is not null;
        if dedup_key is not null or delay > interval '0' then
            perform pgqueue.enqueue(
                n.name, payload, delay, headers, expires_in, message_id, body, dedup_key => publish.dedup_key,
                on_duplicate => publish.on_duplicate)
            from (
                select q.name from pgqueue.queues q
                where q.name = any (names) and q.queue_id = any (queue_ids) and pg_relation_filenode(q.fresh_from_id) is not null
                order by q.name
            ) n;
            get diagnostics sent = row_count;
            return sent;
        end if;
    end if;
    insert into pgqueue.messages (
        queue_name, enqueued_at, visible_at, max_attempts, expires_at, message_id, payload, body, headers, kind
    )
    select
        q.name, at, at, case when pgqueue._count('enqueued', q.name, 1) = 1 then q.max_attempts end,
        pgqueue._add_interval(at, expires_in), publish.message_id, publish.payload, publish.body, publish.headers, q.kind
    from pgqueue.queues q
    where q.name = any (names) and q.queue_id = any (queue_ids)
        and case
            when pg_relation_filenode(q.fresh_from_id) is null then false
            when pg_sequence_last_value(q.waiting_until) <= pgqueue._to_micros(at) then true
            else pgqueue._wake_if_waiting(q, at) is not null
        end
    order by q.name;
    get diagnostics sent = row_count;
    return sent;
end;
$$;
comment on function pgqueue.publish is
'Sends a copy of a message to every queue that is subscribed to topic and to which the caller may send, in the caller''s
transaction, and returns the number of copies; 0 if there is no such queue. base_topics are further topics of the same
event, for example those of its base classes; a queue gets one copy, however many of its subscriptions match. The header
pgqueue.topic of each copy is topic. All else is as in enqueue, for each copy: a message over the limit of one queue is
sent to none. topic is 1 to 255 characters: words joined by dots. A queue in which dedup_key is taken counts, too.
Raises 22023, PQ003.';
