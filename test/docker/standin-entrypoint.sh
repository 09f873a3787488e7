#!/bin/bash
# Initialises PGDATA once, runs /docker-entrypoint-initdb.d/*.sql, then the command, as the user postgres.
set -euo pipefail
if [ "$(id -u)" -eq 0 ]; then
    install -d -o postgres -g postgres -m 0700 "$PGDATA"
    install -d -o postgres -g postgres /var/run/postgresql
    exec setpriv --reuid=postgres --regid=postgres --init-groups "$0" "$@"
fi
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    initdb --pgdata "$PGDATA" --username postgres --auth-local trust --auth-host scram-sha-256 \
        --pwfile <(printf '%s\n' "${POSTGRES_PASSWORD:?set POSTGRES_PASSWORD}")
    echo 'host all all all scram-sha-256' >> "$PGDATA/pg_hba.conf"
    pg_ctl --pgdata "$PGDATA" --wait --options "-c listen_addresses=''" start
    for file in /docker-entrypoint-initdb.d/*.sql; do
        psql --username postgres --no-psqlrc --set ON_ERROR_STOP=1 --file "$file"
    done
    pg_ctl --pgdata "$PGDATA" --mode fast --wait stop
fi
exec "$@"
