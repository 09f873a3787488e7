begin;
-- The locks make test files wait for each other: this file attaches tables and stops the clock.
lock table pgqueue.messages in access exclusive mode;
lock table pgqueue.archived_messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';

select plan(104);

-- What the verb for many claims answers, and what the verb for one claim answers for each of them.
create function pg_temp.settle_many(verb text, queue text, ids bigint[], tokens uuid[]) returns setof pgqueue.settled_claim language plpgsql as $$
begin
    case verb
        when 'ack' then return query select * from pgqueue.ack_claims(queue, ids, tokens);
        when 'nack' then return query select * from pgqueue.nack_claims(queue, ids, tokens, error => 'it broke', headers => '{"tries": 1}');
        when 'extend' then return query select * from pgqueue.extend_claims(queue, ids, tokens, '1 min');
        when 'release' then return query select * from pgqueue.release_claims(queue, ids, tokens);
    end case;
end;
$$;
create function pg_temp.settle_one(verb text, queue text, id bigint, token uuid) returns boolean language plpgsql as $$
begin
    return case verb
        when 'ack' then pgqueue.ack(queue, id, token)
        when 'nack' then pgqueue.nack(queue, id, token, error => 'it broke', headers => '{"tries": 1}')
        when 'extend' then pgqueue.extend(queue, id, token, '1 min')
        when 'release' then pgqueue.release(queue, array[id], token) = 1
    end;
end;
$$;

-- The answers are for pairs of an id and a token.
create function pg_temp.answers(verb text, has_table boolean) returns setof text language plpgsql as $$
declare
    queue constant text := verb || case when has_table then '_dedicated' else '_shared' end;
    ids bigint[];
    t uuid[];
begin
    perform pgqueue.create_queue(queue, dedicated => has_table);
    perform pgqueue.create_queue(queue || '_other');
    ids := array(select pgqueue.enqueue_batch(queue, '{1,2,3,4}'));
    select array_agg(c.claim_token order by c.id) into t from generate_series(1, 3) as n, lateral pgqueue.claim(queue, n - n + 1) c;
    return next is((select count(*) from pg_temp.settle_many(verb, queue, '{}', '{}')), 0::bigint, queue || ': no claims give no answers');
    return next is_empty(
        format('select * from pg_temp.settle_many(%L, %L, %L, %L) s where s.settled', verb, queue || '_other', ids[:3], t),
        queue || ': claims of another queue are lost');
    return next is_empty(
        format('select * from pg_temp.settle_many(%L, %L, %L, %L) s where s.settled', verb, queue, ids[:3], array[t[2], t[3], t[1]]),
        queue || ': the tokens of other messages settle nothing');
    return next is(
        (select array_agg(b.id order by b.id) from pgqueue.browse(queue, 'inflight') b), ids[:3],
        queue || ': messages whose claims were refused stay in flight');
    return next results_eq(
        format('select * from pg_temp.settle_many(%L, %L, %L, %L)', verb, queue,
            array[ids[3], ids[1], 0, ids[1], ids[4], ids[3]], array[t[3], t[2], t[1], t[1], t[1], t[3]]),
        format('values (%s::bigint, true), (%s, false), (0, false), (%s, true), (%s, false), (%s, true)',
            ids[3], ids[1], ids[1], ids[4], ids[3]),
        queue || ': each claim has its own answer, in the order given, also for ids that occur with several tokens or twice');
    if verb <> 'extend' then
        return next is((select array_agg(b.id) from pgqueue.browse(queue, 'inflight') b), ids[2:2], queue || ': only the claims that were given are settled');
        return next is_empty(
            format('select * from pg_temp.settle_many(%L, %L, %L, %L) s where s.settled', verb, queue, array[ids[1], ids[3]], array[t[1], t[3]]),
            queue || ': claims that were settled before are lost');
    end if;
end;
$$;
select pg_temp.answers(v, d) from unnest('{ack,nack,extend,release}'::text[]) as v, unnest('{f,t}'::boolean[]) as d;

-- Two queues with the same messages and claims: in one the claims are settled together, in the other one by one.
create function pg_temp.contents(queue text) returns setof text language sql as $$
    select format('%s %s %s', 'messages', m.payload, (date_trunc('ms', m.visible_at), m.attempt_count, m.claimed_attempt, m.claim_token is null, m.headers, m.last_error))
    from pgqueue.messages m where m.queue_name = queue
    union all
    select format('%s %s %s', 'scheduled', s.payload, (date_trunc('ms', s.due_at + interval '500 us'), s.attempt_count, s.headers, s.last_error))
    from pgqueue.scheduled_messages s where s.queue_name = queue
    union all
    select format('%s %s %s', 'dead', d.payload, (date_trunc('ms', d.died_at), d.attempt_count, d.headers, d.last_error, d.reason))
    from pgqueue.dead_messages d where d.queue_name = queue
    union all
    select format('%s %s %s', 'archived', a.payload, (a.finished_at, a.attempt_count, a.claimed_by))
    from pgqueue.browse_archived_messages(queue, 100) a
    union all
    select format('counted %s', (s.enqueued_total, s.acknowledged_total, s.failed_total, s.dead_total)) from pgqueue.stats(queue) s
    union all
    select format('keys %s', count(*)) from pgqueue.dedup_keys k join pgqueue.queues q using (queue_id) where q.name = queue
    order by 1
$$;
create function pg_temp.settles_alike(kind jsonb) returns setof text language plpgsql as $$
declare
    verb text;
    queue text;
    at timestamptz := '2030-01-01 12:00:00+00';
    ids bigint[];
    tokens uuid[];
    answers boolean[];
    together text[];
begin
    perform pgqueue.create_queue(q, visibility_timeout => '30 s', max_attempts => 2, backoff_jitter => 0,
        archive_for => (kind ->> 'archive_for')::interval, dlq_enabled => not kind ? 'no_dlq',
        group_limit => (kind ->> 'group_limit')::int, max_in_flight => (kind ->> 'max_in_flight')::int,
        rate_limit => (kind ->> 'rate_limit')::int, priorities => kind ? 'priorities', dedup_window => '0')
    from unnest('{together,single}'::text[]) as q;
    foreach verb in array '{ack,nack,extend,release}'::text[] loop
        at := at + interval '1 h';
        foreach queue in array '{together,single}'::text[] loop
            perform set_config('test.now', at::text, true);
            perform pgqueue.enqueue_batch(queue, '{1,2,3,4,5,6}', dedup_keys => '{a,b,c,d,e,f}',
                group_keys => case when kind ? 'group_limit' then '{u,v,w,x,y,z}'::text[] end,
                priorities => case when kind ? 'priorities' then '{1,9,5,5,1,9}'::int[] end);
            -- Two messages have their last attempt, and their claims have ended.
            perform pgqueue.nack(queue, c.id, c.claim_token, '0') from pgqueue.claim(queue, 6) c where c.payload in ('1', '2');
            perform set_config('test.now', (at + interval '25 s')::text, true);
            perform pgqueue.claim(queue, 2, '1 s');
            perform set_config('test.now', (at + interval '27 s')::text, true);
            select array_agg(m.id order by m.payload #>> '{}'), array_agg(m.claim_token order by m.payload #>> '{}') into ids, tokens
            from pgqueue.messages m where m.queue_name = queue;
            if queue = 'together' then
                answers := array(select s.settled from pg_temp.settle_many(verb, queue, ids, tokens) s);
                together := array(select pg_temp.contents(queue));
            else
                return next is(answers,
                    array(select pg_temp.settle_one(verb, queue, i.id, i.token) from unnest(ids, tokens) as i (id, token)),
                    format('%s %s: many claims have the answers of single ones', verb, kind));
                return next is(together, array(select pg_temp.contents(queue)), format('%s %s: many claims are settled like single ones', verb, kind));
            end if;
        end loop;
        perform pgqueue.purge_queue(q), pgqueue.purge_dead_messages(q) from unnest('{together,single}'::text[]) as q;
    end loop;
    perform pgqueue.drop_queue(q) from unnest('{together,single}'::text[]) as q;
end;
$$;
select pg_temp.settles_alike(k::jsonb) from unnest(array[
    '{}', '{"archive_for": "1 day"}', '{"no_dlq": true, "max_in_flight": 6}', '{"group_limit": 1, "archive_for": "1 day"}',
    '{"group_limit": 2, "max_in_flight": 6}', '{"priorities": true, "rate_limit": 100}'
]) as k;
select pgqueue.create_queue('day_missing', archive_for => '1 day') is not null, pgqueue.enqueue('day_missing', '1') is not null \g /dev/null
set local test.now = '2031-01-01 12:00:00+00';
select is((select array_agg(s.settled) from pgqueue.claim('day_missing') c, pgqueue.ack_claims('day_missing', array[c.id], array[c.claim_token]) s), '{t}', 'ack_claims acknowledges on a day without a table');
select is((select count(*) from pgqueue.browse_archived_messages('day_missing')), 1::bigint, 'the archive then keeps the message');

-- Messages that are nacked together are due one after the other, so that claims pass them once.
select pgqueue.create_queue('due') is not null \g /dev/null
select count(*) from pgqueue.enqueue_batch('due', '{1,2,3}') \g /dev/null
select is(
    (select count(*) from (select array_agg(c.id) as ids, array_agg(c.claim_token) as tokens from pgqueue.claim('due', 3) c) c, pgqueue.nack_claims('due', c.ids, c.tokens, '1 min') s where s.settled),
    3::bigint, 'nack_claims returns three messages');
select results_eq(
    $$ select payload, due_at from pgqueue.scheduled_messages where queue_name = 'due' order by due_at $$,
    $$ select to_jsonb(n), pgqueue._now() + interval '1 min' + (n - 1) * interval '1 microsecond' from generate_series(1, 3) n $$,
    'messages of one nack_claims are due in the order of their ids, at different times');

select * from finish();
rollback;
