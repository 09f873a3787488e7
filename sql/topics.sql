-- A message for all who want it: queues subscribe to topics, publish sends each of them a copy, in the
-- caller's transaction. Who shares a queue shares the copy.

create or replace function pgqueue._check_topic(argument text, topic text, may_be_pattern boolean)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    -- A word may hold whatever the name of a type does; * and # are wild only where they are a whole word.
    if topic is null or char_length(topic) not between 1 and 255 or topic ~ '(^|[.])([.]|$)' or topic ~ '[[:cntrl:]]'
        or topic ~ '(^|[.])#[.]#([.]|$)' or not may_be_pattern and topic ~ '(^|[.])[*#]([.]|$)'
    then
        perform pgqueue._raise_invalid(argument, topic,
            '1 to 255 characters: words joined by dots, none empty, no control characters'
            || case when may_be_pattern then '; a word * stands for any one, # for any number of words, and no # follows another'
                else '; * and # are for subscriptions' end);
    end if;
end;
$$;
comment on function pgqueue._check_topic(text, text, boolean) is
'Raises 22023 for what is no topic, nor, where one may be given, a pattern.';

create or replace function pgqueue._matching_patterns(words text[])
returns text[]
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    -- The beginnings of patterns, each word with its dot, that match the words read so far.
    beginnings text[] := '{"",#.}'::text[];
    word text;
begin
    if not exists (select from pgqueue.subscriptions s where s.is_pattern) then
        return '{}'::text[];
    end if;
    -- The index on the words of the patterns is walked as a tree: from each beginning it is asked for the next word,
    -- and for *, alone and with a # behind; what ends in # matches this word too. So the cost depends on the topic and
    -- on what matches, not on how many subscriptions there are.
    foreach word in array words loop
        beginnings := array(
            select c.beginning
            from unnest(beginnings) as b
            cross join lateral (values
                (b || word || '.'), (b || word || '.#.'), (b || '*.'), (b || '*.#.')
            ) as c (beginning)
            where (
                -- The slash follows the dot.
                select true from pgqueue.subscriptions s
                where s.is_pattern and (s.topic || '.') >= c.beginning and (s.topic || '.') < left(c.beginning, -1) || '/'
                order by s.topic || '.' limit 1
            )
            union
            select b from unnest(beginnings) as b where '.' || b like '%.#.'
        );
        exit when beginnings = '{}'::text[];
    end loop;
    return beginnings;
end;
$$;
comment on function pgqueue._matching_patterns(text[]) is
'Patterns that match the words of a topic, each with a dot behind, and some that nobody subscribed to.';

create or replace function pgqueue._subscribers(topics text[])
returns text[]
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    patterns text[] := '{}'::text[];
    topic text;
begin
    foreach topic in array topics loop
        patterns := patterns || pgqueue._matching_patterns(string_to_array(topic, '.'));
    end loop;
    return array(
        select s.queue_name from pgqueue.subscriptions s where s.topic = any (topics)
        union
        select s.queue_name from pgqueue.subscriptions s where s.is_pattern and (s.topic || '.') = any (patterns)
        order by queue_name
    );
end;
$$;
comment on function pgqueue._subscribers(text[]) is
'The queues that are subscribed to any of the topics, each once, in the order in which they are locked.';

create or replace function pgqueue.subscribe(topic text, queue_name text)
returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    q constant pgqueue.queues := pgqueue._get_locked_queue(queue_name);
begin
    perform pgqueue._check_topic('topic', topic collate "default", true);
    insert into pgqueue.subscriptions (topic, queue_name, endpoint, queue_address)
    -- No queue's name alone: a transport may have an endpoint that is called like a queue which is not its own.
    values (subscribe.topic, q.name, 'pgqueue:' || q.name, q.name)
    on conflict do nothing;
    return found;
end;
$$;
comment on function pgqueue.subscribe(text, text) is
'Lets the queue have a copy of what is published to topic from now on, and returns true; false if it is subscribed already. topic is 1 to 255 characters, words joined by dots; in their place, * stands for exactly one word and # for any number, none included: orders.* matches orders.paid, orders.# also orders and orders.paid.late. A queue that several subscriptions match gets one copy. Raises 22023, PQ001.';

create or replace function pgqueue.unsubscribe(topic text, queue_name text)
returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform pgqueue._check_topic('topic', topic collate "default", true);
    perform pgqueue._get_locked_queue(queue_name);
    delete from pgqueue.subscriptions s
    where s.topic = unsubscribe.topic collate "C" and s.queue_name = unsubscribe.queue_name collate "C";
    return found;
end;
$$;
comment on function pgqueue.unsubscribe(text, text) is
'Ends a subscription, named as it was made, and returns true; false if there was none. What was published before stays in the queue. Raises 22023, PQ001.';

create or replace function pgqueue.list_subscriptions(queue_name text default null)
returns setof pgqueue.subscription
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if queue_name is not null then
        perform pgqueue._get_unlocked_queue(queue_name);
    end if;
    return query
    -- A queue may have subscribed by itself, and as the address of endpoints.
    select s.topic, s.queue_name, min(s.subscribed_at) from pgqueue.subscriptions s
    where list_subscriptions.queue_name is null or s.queue_name = list_subscriptions.queue_name collate "C"
    group by s.topic, s.queue_name
    order by s.topic, s.queue_name;
end;
$$;
comment on function pgqueue.list_subscriptions(text) is
'Returns the subscriptions of a queue, or all, by topic and queue, each once and since when, whoever made it: the queue itself, or endpoints of a transport. Raises PQ001.';

create or replace function pgqueue.publish(
    topic text,
    payload jsonb default null,
    delay interval default '0',
    headers jsonb default null,
    expires_in interval default null,
    message_id uuid default null,
    body bytea default null,
    base_topics text[] default null
)
returns int
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    at constant timestamptz := pgqueue._now();
    names text[] collate "C";
    queue_ids bigint[];
    smallest pgqueue.queues;
    sent int;
begin
    perform pgqueue._check_topic('topic', topic collate "default", false);
    if base_topics is not null then
        perform pgqueue._check_topic('base_topics', t collate "default", false) from unnest(base_topics) as t;
    end if;
    perform pgqueue._check_enqueue(delay, expires_in);

    select array_agg(q.name order by q.name), array_agg(q.queue_id) into names, queue_ids
    from pgqueue.queues q
    where q.name = any ((select pgqueue._subscribers((topic || array(select unnest(base_topics))) collate "C"))::text[]);
    -- One after the other, by name. Who waited here for a drop_queue finds that the queue is gone, or another one of
    -- its name, whatever that is subscribed to; a snapshot may be older still, but the catalog knows.
    perform pgqueue._lock_queue(n) from unnest(names) as n;
    select
        array_agg(q.name order by q.name), min(q.max_payload_bytes),
        coalesce((array_agg(q.name order by q.max_payload_bytes))[1], '')
    into names, smallest.max_payload_bytes, smallest.name
    from pgqueue.queues q
    where q.name = any (names) and q.queue_id = any (queue_ids) and pg_relation_filenode(q.fresh_from_id) is not null;
    if headers is null or jsonb_typeof(headers) = 'object' then
        headers := coalesce(headers, '{}') || jsonb_build_object('pgqueue.topic', topic);
    end if;
    perform pgqueue._check_content(smallest, payload, body, headers);

    if delay > interval '0' then
        insert into pgqueue.scheduled_messages (
            queue_name, due_at, enqueued_at, max_attempts, expires_at, message_id, payload, body, headers
        )
        select
            q.name, pgqueue._add_interval(at, delay), at, q.max_attempts, pgqueue._add_interval(at, expires_in),
            publish.message_id, publish.payload, publish.body, publish.headers
        from pgqueue.queues q
        where q.name = any (names)
        order by q.name;
        get diagnostics sent = row_count;
        perform pgqueue._announce_due(q, pgqueue._add_interval(at, delay))
        from pgqueue.queues q
        where q.name = any (names);
    else
        insert into pgqueue.messages (
            queue_name, enqueued_at, visible_at, max_attempts, expires_at, message_id, payload, body, headers
        )
        select
            q.name, at, at, q.max_attempts, pgqueue._add_interval(at, expires_in),
            publish.message_id, publish.payload, publish.body, publish.headers
        from pgqueue.queues q
        where q.name = any (names)
        order by q.name;
        get diagnostics sent = row_count;
        perform pgqueue._wake(q)
        from pgqueue.queues q
        where q.name = any (names) and pg_sequence_last_value(q.waiting_until) > pgqueue._to_micros(at);
    end if;
    return sent;
end;
$$;
comment on function pgqueue.publish(text, jsonb, interval, jsonb, interval, uuid, bytea, text[]) is
'Sends a copy of a message to every queue that is subscribed to topic, in the caller''s transaction, and returns how many those are: 0, and nothing is sent, where nobody is. base_topics are further names of the same event, those of its base classes for example; a queue gets one copy, however many of its subscriptions match. The header pgqueue.topic says topic to the subscribers. Everything else is as in enqueue, and holds for each copy: one queue''s limit refuses all. topic is 1 to 255 characters, words joined by dots. Raises 22023, PQ003.';

create or replace function pgqueue._on_queue_dropping_topics(q pgqueue.queues)
returns void
language sql volatile
as $$ delete from pgqueue.subscriptions s where s.queue_name = q.name $$;
comment on function pgqueue._on_queue_dropping_topics(pgqueue.queues) is
'Ends the subscriptions of the queue.';
