# `pgqueue serve`, from the wheel that `make release` has built: docker build -f test/docker/serve.Dockerfile .cache/release
FROM python:3.13-slim-bookworm
LABEL org.opencontainers.image.title="pgqueue serve" \
    org.opencontainers.image.description="Queues in PostgreSQL over HTTP" \
    org.opencontainers.image.licenses="PostgreSQL"
# For an image of a program that uses pgqueue: other extras, and packages of its own.
ARG EXTRAS=http
ARG PACKAGES=
# hadolint ignore=DL3013,SC2086
RUN --mount=type=bind,source=.,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/pgqueue_sql-*.whl)[$EXTRAS]" $PACKAGES \
    && useradd --system --uid 10001 pgqueue
USER 10001
EXPOSE 8080
HEALTHCHECK --start-period=30s CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8080/healthz')"]
ENTRYPOINT ["pgqueue"]
CMD ["serve", "--host", "0.0.0.0"]
