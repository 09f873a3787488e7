begin;
-- The lock makes test files wait for each other: this file stops the clock.
lock table pgqueue.messages in access exclusive mode;
create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe
as $$ select current_setting('test.now')::timestamptz $$;
set local test.now = '2030-01-01 12:00:00+00';

select plan(39);

create function pg_temp.cancels(queue text, is_dedicated boolean) returns setof text language plpgsql as $$
declare
    ready bigint;
    later bigint;
    mine pgqueue.message;
begin
    perform pgqueue.create_queue(queue, '30 s', dedicated => is_dedicated);
    ready := pgqueue.enqueue(queue, '1');
    later := pgqueue.enqueue(queue, '2', delay => '1 h');
    return next is(pgqueue.cancel(queue, ready), true, queue || ': cancel removes a ready message');
    return next is(pgqueue.cancel(queue, later), true, queue || ': cancel removes a scheduled message');
    return next is(pgqueue.cancel(queue, ready), false, queue || ': cancel returns false for a message that is gone');
    return next is((select s.ready_messages + s.scheduled_messages + s.dead_messages from pgqueue.stats(queue) s), 0::bigint, queue || ': cancelled messages leave the queue, and become no dead letters');
    ready := pgqueue.enqueue(queue, '3');
    select * into mine from pgqueue.claim(queue);
    return next is(pgqueue.cancel(queue, ready), false, queue || ': cancel returns false for a message that is claimed');
    perform set_config('test.now', '2030-01-01 12:01:00+00', true);
    return next is(pgqueue.cancel(queue, ready), true, queue || ': cancel removes a message whose claim has ended');
    return next is(pgqueue.ack(queue, mine.id, mine.claim_token), false, queue || ': a consumer whose message was cancelled has lost its claim');
    perform set_config('test.now', '2030-01-01 12:00:00+00', true);
end;
$$;
select pg_temp.cancels('cancel_shared', false);
select pg_temp.cancels('cancel_dedicated', true);

select pgqueue.create_queue('cancel_other') is not null as made, pgqueue.enqueue('cancel_shared', '1') as number \gset
select is(pgqueue.cancel('cancel_other', :number), false, 'cancel removes no message of another queue');
select is(pgqueue.cancel('cancel_shared', :number), true, 'cancel removes the message of its own queue');
select pgqueue.create_queue('cancel_group', group_limit => 1) is not null as made, pgqueue.enqueue('cancel_group', '1', group_key => 'a') as number \gset
select c.claim_token as token from pgqueue.claim('cancel_group') c \gset
select is(pgqueue.cancel('cancel_group', :number), false, 'cancel returns false for a message of a group that is claimed');
select is(pgqueue.nack('cancel_group', :number, :'token', '1 h') and pgqueue.cancel('cancel_group', :number), true, 'cancel removes a message of a group that waits for its retry');
select throws_ok($$ select pgqueue.cancel('cancel_shared', null) $$, '22023', 'invalid id: null', 'cancel refuses null as id');

create function pg_temp.reschedules(queue text, is_dedicated boolean) returns setof text language plpgsql as $$
declare
    later bigint;
    mine pgqueue.message;
begin
    perform pgqueue.create_queue(queue, '30 s', dedicated => is_dedicated);
    later := pgqueue.enqueue(queue, '"later"', delay => '1 h');
    return next is(pgqueue.reschedule(queue, later), true, queue || ': reschedule without a time makes a delayed message due now');
    return next is(pgqueue.reschedule(queue, later, '2030-01-01 13:00:00+00'), false, queue || ': reschedule leaves a message that is due');
    select * into mine from pgqueue.claim(queue);
    return next is(mine.id, later, queue || ': the next claim takes a message that was made due now');
    return next is(pgqueue.reschedule(queue, later), false, queue || ': reschedule returns false for a message that is claimed');
    perform pgqueue.nack(queue, later, mine.claim_token, '1 h', 'declined');
    return next is(pgqueue.reschedule(queue, later, '-infinity'), true, queue || ': reschedule takes a time that has passed for now, also for a message that waits for its retry');
    select * into mine from pgqueue.claim(queue);
    return next is(format('%s %s %s', mine.id, mine.attempt_count, mine.last_error), format('%s 2 declined', later), queue || ': a message that was rescheduled keeps its attempts and its error');
    return next is(pgqueue.ack(queue, later, mine.claim_token) and not pgqueue.reschedule(queue, later), true, queue || ': reschedule returns false for a message that is gone');
    later := pgqueue.enqueue(queue, '"later"', delay => '1 h');
    perform pgqueue.reschedule(queue, later, '2030-01-01 15:00:00+00');
    return next is(pgqueue.next_due_at(queue), '2030-01-01 15:00:00+00', queue || ': reschedule delays a message further');
end;
$$;
select pg_temp.reschedules('reschedule_shared', false);
select pg_temp.reschedules('reschedule_dedicated', true);

select pgqueue.enqueue('cancel_group', '2', group_key => 'b') as number, pgqueue.enqueue('cancel_group', '3', group_key => 'b') as later \gset
select c.claim_token as token from pgqueue.claim('cancel_group') c \gset
select pgqueue.nack('cancel_group', :number, :'token', '1 h') as returned \gset
select is((select count(*) from pgqueue.claim('cancel_group', 10)), 0::bigint, 'a message that waits for its retry keeps its group waiting');
select pgqueue.reschedule('cancel_group', :number) as rescheduled \gset
select is((select array_agg(c.id) from pgqueue.claim('cancel_group', 10) c), array[:number::bigint], 'reschedule makes a message of a group due, in its place before the later ones');
select throws_ok($$ select pgqueue.reschedule('cancel_shared', null) $$, '22023', 'invalid id: null', 'reschedule refuses null as id');
select throws_ok($$ select pgqueue.reschedule('cancel_shared', 1, 'infinity') $$, '22023', 'invalid due_at: ''infinity''', 'reschedule refuses a time more than 10 years ahead');

select * from finish();
rollback;
