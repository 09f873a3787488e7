-- What plpgsql_check finds in the functions of pgqueue, one finding a row. It checks a trigger function for each of its
-- tables.
select format('%s, line %s: %s %s: %s', p.oid::regprocedure, f.lineno, f.level, f.sqlstate, concat_ws('; ', f.message, f.detail, f.hint))
from pg_proc p
join pg_language l on l.oid = p.prolang and l.lanname = 'plpgsql'
left join pg_trigger t on t.tgfoid = p.oid
cross join lateral plpgsql_check_function_tb(
    p.oid,
    relid => coalesce(t.tgrelid, 0),
    fatal_errors => false,
    extra_warnings => true,
    security_warnings => true,
    compatibility_warnings => true
) f
where p.pronamespace = 'pgqueue'::regnamespace
    -- Those whose triggers are made later are read by house.sql.
    and (p.prorettype <> 'trigger'::regtype or t.oid is not null)
order by p.oid::regprocedure::text, f.lineno;
