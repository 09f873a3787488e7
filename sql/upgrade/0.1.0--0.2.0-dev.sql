-- What `create or replace` cannot say of the way from 0.1.0 to 0.2.0-dev.
create index schedules_queue_name on pgqueue.schedules (queue_name);

-- Only public functions have comments.
do $$
declare
    commented regprocedure;
begin
    for commented in
        select d.objoid from pg_catalog.pg_description d join pg_catalog.pg_proc p on p.oid = d.objoid
        where d.classoid = 'pg_catalog.pg_proc'::pg_catalog.regclass and p.proname ~ '^_'
            and p.pronamespace = 'pgqueue'::pg_catalog.regnamespace and pg_catalog.pg_has_role(p.proowner, 'usage')
    loop
        execute pg_catalog.format('comment on routine %s is null', commented);
    end loop;
end;
$$;

-- Private functions that have gone, or have got other arguments or results.
drop function pgqueue._days, pgqueue._expired_days, pgqueue._is_day_empty, pgqueue._maintain_days, pgqueue._drop_days;
drop function pgqueue._raise_stream_out_of_step, pgqueue._raise_stream_data_lost, pgqueue._raise_stream_poisoned;
drop function pgqueue._format_ids, pgqueue._first_tick_of_day, pgqueue._canonical_time_zone, pgqueue._access_matrix;
drop function pgqueue._on_queue_changed_schedules, pgqueue._on_queue_changed_topics, pgqueue._on_queue_changed_results;
drop function pgqueue._on_housekeeping_due_archive, pgqueue._on_housekeeping_due_results;
drop function pgqueue._compactable_tables, pgqueue._overgrown_tables, pgqueue._tables_to_compact, pgqueue._column_list;
drop function pgqueue._remove_expired_results, pgqueue._compact_table, pgqueue._is_first_statement, pgqueue._is_idle;
drop function pgqueue._are_only_visible;
drop function pgqueue._backoff, pgqueue._wake, pgqueue._wake_dead_letter_queue, pgqueue._archive_marker;
drop function pgqueue._delete_claimed, pgqueue._as_archived, pgqueue._add_undelivered_dead_letter;
drop function pgqueue._check_dedup, pgqueue._check_groups_and_priorities, pgqueue._first_id_of;
drop function pgqueue._first_due_at_of, pgqueue._first_check_at_of, pgqueue._delete_messages;
drop function pgqueue._group_position(pgqueue.messages), pgqueue._rate_register, pgqueue._rate_period_micros;
drop function pgqueue._rate_used_until, pgqueue._available_tokens, pgqueue._token_refill_micros, pgqueue._allowed_at;
drop function pgqueue._announce_claim_end, pgqueue._total_query;
drop function pgqueue._refuse_cron, pgqueue._last_tick, pgqueue._raise_null_column, pgqueue._relation_query;
drop function pgqueue._contract_comment, pgqueue._check_contract_schema, pgqueue._subscriptions_comment;
drop function pgqueue._check_exposure;
drop function pgqueue._dedup_period, pgqueue._dedup_slice, pgqueue._is_hourly_reset_due, pgqueue._are_many_pages;
drop function pgqueue._reserve_queue;
drop function pgqueue._findings_of_routing;
drop function pgqueue._is_spent(pgqueue.messages, timestamptz);
drop function pgqueue._is_spent(pgqueue.messages_shared, timestamptz);
drop function pgqueue._check_claim, pgqueue._check_dedicated, pgqueue._check_settings, pgqueue._create_partition;
drop function pgqueue._drop_partition_left, pgqueue._free_dedup_key, pgqueue._has_current_key_lookup;
drop function pgqueue._last_id_from, pgqueue._move_delayed_to_dead_letters, pgqueue._refuse_missing_queue;
drop function pgqueue._on_queue_sweeping_dead_letter_to, pgqueue._take_highest, pgqueue._walk_from;
drop function pgqueue._with_new_registers;
