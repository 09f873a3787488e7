-- Each upgrade script begins with this block. It records the access that each role has in the installed version, whose
-- functions it calls. At the end of the script grants.sql reads the record and grants the functions that are new.
do $$
begin
    perform pg_catalog.set_config('pgqueue.had_access', (
        select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(r.rolname, k))::text
        from pg_catalog.pg_roles r, unnest(array['producer', 'consumer', 'admin', 'reader', 'raw', 'transport']) as k
        where r.oid in (
            select a.grantee from pg_catalog.pg_proc p cross join lateral pg_catalog.aclexplode(p.proacl) as a
            where p.pronamespace = 'pgqueue'::regnamespace and a.grantee <> p.proowner
        ) and pgqueue._has_access(r.rolname, k)
    ), true);
end;
$$;
