"""Spark for the tests: one session, as small as it gets, in one JVM for the whole run."""

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

# Tasks are tried four times, as on a cluster: local[2] alone would try them once. Workers may take their time, as on
# a machine that is busy.
SETTINGS = {
    "spark.master": "local[2,4]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "768m",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.session.timeZone": "UTC",
    "spark.python.authenticate.socketTimeout": "120s",
    "spark.log.level": "OFF",
}


def missing() -> str | None:
    """What Spark needs and this machine lacks."""
    try:
        from pgqueue.spark.java import JavaNotFoundError, use_java
    except ImportError as error:
        return str(error)
    try:
        use_java()
    except JavaNotFoundError as error:
        return str(error)
    return None


def session(**settings: str) -> Any:
    """A new session, in a process that has none."""
    from pyspark.sql import SparkSession

    # Before the JVM starts: its workers are this Python.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName("pgqueue")
    for name, value in (SETTINGS | settings).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session, for the whole run; skipped where something is missing, but not in CI."""
    if lacking := missing():
        if os.environ.get("CI"):
            pytest.fail(lacking)
        pytest.skip(lacking)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_LOCAL_DIRS", str(tmp_path_factory.mktemp("spark")))
        spark = session(**{"spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse"))})
        yield spark
        spark.stop()


@pytest.fixture
def role(database: str, name: str) -> Iterator[Callable[[str], str]]:
    """Makes a role that has one access, and says how to connect as it."""
    made: list[sql.Identifier] = []
    with psycopg.connect(database, autocommit=True) as connection:

        def make(access: str) -> str:
            role = f"{name}-{access}-{secrets.token_hex(4)}"
            connection.execute(sql.SQL("create role {}").format(sql.Identifier(role)))
            made.append(sql.Identifier(role))
            connection.execute("select pgqueue.grant_access(%s, %s)", [role, access])
            return make_conninfo(database, options=f"-c role={role}")

        yield make
        for one in made:
            connection.execute(sql.SQL("drop owned by {0}; drop role {0}").format(one))
