-- Claims from several queues in one call, for consumers that serve queues of different importance.

create or replace function pgqueue.claim_any(
    queue_names text[],
    max_messages int default 1,
    visibility_timeout interval default null,
    claimed_by text default null,
    caller pgqueue.caller default current_user
) returns setof pgqueue.message
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan set jit = off as $$
declare
    queue_name text;
    wanted int := max_messages;
    found_messages int;
    grouped_queues_left int := 10;
begin
    if queue_names is null or array_ndims(queue_names) is distinct from 1 or cardinality(queue_names) > 100
        or array_position(queue_names, null) is not null
        or cardinality(queue_names) > (select count(distinct n collate "C") from unnest(queue_names) as n)
    then
        perform pgqueue._raise_invalid('queue_names', left(queue_names::text, 300),
            'an array of 1 to 100 names of queues, each once');
    end if;
    -- An array of a domain would not do: PostgreSQL checks a literal of such a type when it parses the statement, with
    -- the rights of that role, and not again for the role that runs a view, function or prepared statement later.
    foreach queue_name in array queue_names loop
        if not pgqueue._may_use(caller, queue_name, pgqueue._privileges_of('{consumer}')) then
            perform pgqueue._raise('queue_not_found', queue_name, caller, 'consumer');
        end if;
        return query select m.* from pgqueue.claim(queue_name, wanted, visibility_timeout, claimed_by) m;
        get diagnostics found_messages = row_count;
        wanted := wanted - found_messages;
        exit when wanted = 0;
        if found_messages > 0 and exists (
            select from pgqueue.queues q where q.name = queue_name collate "C" and q.group_limit is not null
        ) then
            -- Each of these claims keeps up to 100 locks of groups until the transaction ends. A hundred such claims
            -- could fill the lock table of the server.
            grouped_queues_left := grouped_queues_left - 1;
            exit when grouped_queues_left = 0;
        end if;
    end loop;
end;
$$;
comment on function pgqueue.claim_any is
'Claims up to max_messages (1 to 10000) messages from several queues (1 to 100), as claim does: as many as possible from
the first queue, then from the next. So while an earlier queue has ready messages, later ones wait. The messages of one
queue have the same claim_token; settle each under its own queue_name. Queues that come after max_messages messages are
not looked at, nor those that come after ten queues with group_limit that had messages. Raises 22023, PQ001.';
