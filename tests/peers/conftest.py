# SPDX-License-Identifier: Apache-2.0
"""Fixtures: `joined` and `with_bitsandbytes` run code where lowbit is installed with its entry points, as pip does it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Imports bitsandbytes and then runs nothing, so that a child has no threads: 10 CPU seconds once, and not
# for every test.
FORKING = """
import json, os, signal, sys, traceback, bitsandbytes, lowbit
for line in sys.stdin:
    code, arguments, out = json.loads(line)
    child = os.fork()
    if child == 0:
        file = os.open(out, os.O_WRONLY)
        os.dup2(file, 1), os.dup2(file, 2)
        signal.alarm(600)
        sys.argv = ["-c", *arguments]
        try:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        os._exit(status)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def _path_with_entry_points(folder: Path) -> str:
    entry = folder / "lowbit_of_the_test-0.dist-info"
    entry.mkdir()
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: lowbit-of-the-test\nVersion: 0\n")
    (entry / "entry_points.txt").write_text("[bitsandbytes.backends]\nlowbit_of_the_test = lowbit_autoload:bitsandbytes\n")
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


@pytest.fixture
def joined(python: Callable[..., str], tmp_path: Path) -> Callable[..., str]:
    """Run code in a fresh interpreter."""
    path = _path_with_entry_points(tmp_path)
    return lambda code, *arguments, **environment: python(code, *arguments, PYTHONPATH=path, **environment)


@pytest.fixture(scope="session")
def with_bitsandbytes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Run code in a fork of an interpreter that has imported bitsandbytes, in an environment; returns its stdout, fails if it fails."""
    path = _path_with_entry_points(tmp_path_factory.mktemp("entry"))

    with contextlib.ExitStack() as servers:

        @functools.cache
        def server(**environment: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", FORKING]
            merged = os.environ | {"PYTHONPATH": path} | environment
            process = subprocess.Popen(command, env=merged, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            servers.enter_context(process)
            servers.callback(process.kill)
            return process

        def run(code: str, *arguments: str, **environment: str) -> str:
            process = server(**environment)
            with tempfile.NamedTemporaryFile("r") as out:
                process.stdin.write(json.dumps([code, arguments, out.name]) + "\n")
                process.stdin.flush()
                status = process.stdout.readline()
                said = out.read()
            assert status == "0\n", f"status {status}\n{said}"
            return said

        yield run
