-- The subscriptions of a transport: a relation over subscriptions that an NServiceBus transport uses like its own
-- table. A trigger of subscriptions finds the queue of an address, and the address of a queue.

create or replace function pgqueue._match_subscription() returns trigger
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    found_name text;
    q pgqueue.queues;
begin
    if tg_op = 'INSERT' and new.queue_name is not null then
        select queues.* into q from pgqueue.queues where queues.name = new.queue_name;
        if found then
            new.queue_address := coalesce(pgqueue._transport_address(pgqueue._transport_of(q)), new.queue_address);
        end if;
        return new;
    end if;
    if new.topic is null then
        perform pgqueue._raise('null_column', tg_table_schema, tg_table_name, 'topic');
    end if;
    if new.queue_address is null then
        perform pgqueue._raise('null_column', tg_table_schema, tg_table_name, 'queue_address');
    end if;
    perform pgqueue._check_topic('topic', new.topic, true);
    perform pgqueue._require_untruncated('{pgqueue.transports}');
    select t.queue_name into found_name
    from pgqueue.transports t
    where pgqueue._transport_address(t.relation) = new.queue_address;
    new.queue_name := (pgqueue._get_locked_queue(coalesce(found_name, new.queue_address))).name;
    return new;
end;
$$;

create or replace trigger match_new_subscription
before insert on pgqueue.subscriptions
for each row when (new.queue_name is null or new.queue_address = new.queue_name)
execute function pgqueue._match_subscription();

create or replace trigger match_changed_subscription
before update of queue_address on pgqueue.subscriptions
for each row when (new.queue_address is distinct from old.queue_address)
execute function pgqueue._match_subscription();

create or replace function pgqueue.expose_subscriptions(
    schema_name text default 'public', table_name text default 'SubscriptionRouting',
    caller pgqueue.caller default current_user
) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    relation text;
begin
    perform pgqueue._require_admin_of_all(caller, 'expose_subscriptions');
    -- Such calls take turns. Otherwise the second would fail with an error of the catalog.
    lock table only pgqueue.subscriptions in share update exclusive mode;
    perform pgqueue._require_current_snapshot('pgqueue.subscriptions');
    perform pgqueue._check_exposure(schema_name collate "C", table_name, caller);
    relation := format('%I.%I', schema_name, table_name);
    -- A transport sends an event to all addresses or to none, and fails if one is not a relation. So the view does not
    -- show the subscriptions of a queue without a relation, whose address is the name of the queue, or whose relation
    -- was dropped or renamed by hand. to_regclass would require the reader to have access to the schemas of all.
    execute format(
        'create view %s as select s.queue_address as queueaddress, s.endpoint, s.topic from pgqueue.subscriptions s'
        ' where case when s.queue_address <> s.queue_name then exists ('
        'select from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace'
        ' where c.relname = (parse_ident(s.queue_address))[2] and n.nspname = (parse_ident(s.queue_address))[1]) end',
        relation);
    perform pgqueue._revoke_default_privileges(relation::regclass);
    execute format('comment on view %s is %L', relation, pgqueue._exposed_comment('subscriptions'));
    execute format('grant select, insert, update, delete on %s to %I with grant option', relation, caller);
    return pgqueue._transport_address(relation::regclass);
end;
$$;
comment on function pgqueue.expose_subscriptions is
'Creates a relation over the subscriptions, table_name in schema_name, and returns its address. An NServiceBus transport
uses it like its own table. The columns are queueaddress, endpoint and topic. It shows the subscriptions of queues that
have a relation of expose_transport: what an endpoint publishes reaches those that are subscribed to exactly the name of
the event or of one of its base types. publish reaches all subscribed queues, also by patterns. An address is one that
expose_transport returned, or the name of a queue; an address that leads to no queue raises PQ001. An endpoint has each
topic once across all such relations: two systems in one database need different endpoint names. A role that may insert
into the relation can subscribe any queue to any topic. The caller needs the CREATE privilege on the schema, and gets
all privileges on the relation, with grant option. Raises 22023, 42501, and 42P07 if the name is taken.';

create or replace function pgqueue.unexpose_subscriptions(
    schema_name text default 'public', table_name text default 'SubscriptionRouting',
    caller pgqueue.caller default current_user
) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    relation regclass;
begin
    perform pgqueue._require(schema_name is not null, 'schema_name', null, 'the name of a schema');
    perform pgqueue._require(
        table_name is not null, 'table_name', null, 'the name of a relation that expose_subscriptions made');
    perform pgqueue._require_admin_of_all(caller, 'unexpose_subscriptions');
    lock table only pgqueue.subscriptions in share update exclusive mode;
    perform pgqueue._require_current_snapshot('pgqueue.subscriptions');
    select c.oid into relation from pg_class c
    where c.oid = to_regclass(format('%I.%I', schema_name, table_name)) and c.relkind = 'v'
        and pg_get_userbyid(c.relowner) = current_user
        and obj_description(c.oid, 'pg_class') = pgqueue._exposed_comment('subscriptions');
    if found then
        execute format('drop view %s', relation);
    end if;
    return relation is not null;
end;
$$;
comment on function pgqueue.unexpose_subscriptions is
'Drops a relation that expose_subscriptions created and returns true; false if there is none. The subscriptions stay.
Raises 22023, and 2BP01 if another object depends on the relation.';
