"""Starts commands in less time than Python: it has imported the command line, and forks for each of them.

Standard input is a socket. A request has the words, the environment and the directory of a command, and the files of
its standard streams and a socket, to which its process id is written, and its exit status when it has ended.
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from fcntl import ioctl
from termios import TIOCSCTTY

import typer.main
from typer.main import get_command

import pgqueue.cli
import pgqueue.consumer

STREAMS = 3


def paths(environment: Mapping[str, str]) -> list[str]:
    """The directories of PYTHONPATH."""
    return [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]


def begin(request: bytes, files: list[int]) -> int:
    """Become the process of a command, and run it. Returns the exit status."""
    words, environment, directory = json.loads(request)
    for stream, file in enumerate(files):
        os.dup2(file, stream)
        os.close(file)
    if os.isatty(0):
        os.setsid()
        ioctl(0, TIOCSCTTY, 0)
    others = [path for path in sys.path[1:] if path not in paths(os.environ)]
    sys.path[:] = [directory, *paths(environment), *others]
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.chdir(directory)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    encoding = environment.get("PYTHONIOENCODING")
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding=encoding, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding, "backslashreplace", closefd=False)
    return pgqueue.cli.main(words)


def main() -> int:
    """Fork for each request until the tests end. Returns the exit status of this process, or of a command."""
    requests = socket.socket(fileno=0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    commands = get_command(pgqueue.cli.app)  # which takes longer than most commands
    vars(typer.main)["get_command"] = lambda _: commands
    gc.freeze()
    while True:
        request, files, *_ = socket.recv_fds(requests, 2**20, STREAMS + 1)
        if not request:
            return 0
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those that have waited for commands
                pass
        if "serve" in json.loads(request)[0]:
            importlib.import_module("pgqueue.http")  # so that a second server starts sooner than the first one
        if os.fork() == 0:
            break
        for file in files:
            os.close(file)
    reports = socket.socket(fileno=files.pop())
    if (pid := os.fork()) == 0:
        requests.detach()
        reports.close()
        return begin(request, files)
    for file in files:
        os.close(file)
    reports.send(str(pid).encode())
    _, status = os.waitpid(pid, 0)
    reports.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
