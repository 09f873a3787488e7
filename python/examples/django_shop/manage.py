#!/usr/bin/env python
"""Runs the commands of the shop. If PGQUEUE_DSN names no database, each command has a private server of its own."""

import os
import sys

from django.core.management import execute_from_command_line

from pgqueue.embedded import EmbeddedServer

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
    if os.environ.get("PGQUEUE_DSN"):
        execute_from_command_line(sys.argv)
    else:
        with EmbeddedServer() as server:
            os.environ["PGQUEUE_DSN"] = server.dsn
            execute_from_command_line(sys.argv)
