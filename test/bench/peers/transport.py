"""A table of NServiceBus's PostgreSQL transport, bare: its delete is claim and acknowledgement."""

from typing import ClassVar

from .bare import BareTable

TABLE = """
create table public.endpoint (
    id uuid not null primary key, expires timestamp, headers text not null, body bytea, seq bigserial not null unique
)
"""
HEADERS = '{"NServiceBus.MessageId": "1"}'


class Transport(BareTable):
    name = "transport's delete"
    table = "public.endpoint"
    definition = TABLE
    filling = (
        "insert into public.endpoint (id, headers, body)"
        f" select gen_random_uuid(), '{HEADERS}', convert_to(%(payload)s, 'UTF8')"
        " from generate_series(1, %(messages)s)"
    )
    scripts: ClassVar = {
        ("take", 1): r"""
            delete from public.endpoint rs
            where rs.id = (select id from public.endpoint order by seq limit 1 for update skip locked)
            returning id as mid, headers as tok, body as body,
                case when expires is null then 0 when expires > now() at time zone 'UTC' then 0 else 1 end as expired
            \gset
        """
    }
