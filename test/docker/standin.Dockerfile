# Replaces the official image if no registry can be reached: Debian's PostgreSQL, and the parts of the official
# entrypoint that the test needs.
# hadolint ignore=DL3006
ARG ROOT
FROM ${ROOT}
ENV PG_MAJOR=15 LANG=C.UTF-8 PGDATA=/var/lib/postgresql/data PATH=/usr/lib/postgresql/15/bin:$PATH
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends postgresql-common \
    && echo 'create_main_cluster = false' > /etc/postgresql-common/createcluster.conf \
    && apt-get install -y --no-install-recommends postgresql-15 \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir /docker-entrypoint-initdb.d \
    && install -d -o postgres -g postgres -m 0700 "$PGDATA"
# As in the official images before 18.
VOLUME /var/lib/postgresql/data
COPY standin-entrypoint.sh /usr/local/bin/
ENTRYPOINT ["standin-entrypoint.sh"]
STOPSIGNAL SIGINT
EXPOSE 5432
CMD ["postgres", "-c", "listen_addresses=*"]
