# SPDX-License-Identifier: Apache-2.0
"""Processes that begin with torch and pytest imported: forks of one that waits for them, with its environment changed.

A fresh run of pytest takes 5.3 CPU seconds before its first test, a fork 2.1; a program that imports torch and lowbit 2.2 and 1.1
(Zen 3). Not for tests of what an import does, nor where the environment has what is read when a process starts or torch is imported
(`AT_IMPORT`): those get a fresh interpreter.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

AT_IMPORT = re.compile("PYTHON|LD_|OMP_|GOMP_|KMP_|MKL_|OPENBLAS_|MALLOC_|GLIBC_|TORCH|LOWBIT_(AUTOLOAD|SIM|STRICT|BITSANDBYTES)$")


class Waiting:
    """The process that forks."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        # A group of its own, with all forks: a test that hangs is ended as a whole.
        self.process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        atexit.register(self.end)

    def serves(self, environment: dict[str, str]) -> bool:
        both = self.environment.items() ^ environment.items()
        return self.process.poll() is None and not any(AT_IMPORT.match(name) for name, _ in both)

    def run(self, command: list[str], environment: dict[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as folder:
            wanted = {"command": command, "environment": environment, "folder": os.getcwd(), "files": [f"{folder}/out", f"{folder}/err"]}
            self.process.stdin.write(json.dumps(wanted).encode() + b"\n")
            self.process.stdin.flush()
            if not select.select([self.process.stdout], [], [], timeout)[0]:
                self.end()
                raise subprocess.TimeoutExpired(command, timeout)
            code = os.waitstatus_to_exitcode(int(self.process.stdout.readline()))
            said, errors = (Path(file).read_text(errors="replace") for file in wanted["files"])
        return subprocess.CompletedProcess(command, code, said, errors)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


_waiting = functools.lru_cache(maxsize=1)(Waiting)


def run(*command: str, timeout: float = 600, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -c code argument..` or `python -m pytest argument..`, without the `python`."""
    merged = os.environ | environment
    if _waiting().process.poll() is not None:  # a test that hung has ended it
        _waiting.cache_clear()
    if _waiting().serves(merged):
        return _waiting().run(list(command), merged, timeout)
    return subprocess.run([sys.executable, *command], env=merged, capture_output=True, text=True, timeout=timeout, check=False)


def _fork_for(request: dict) -> bool:
    """Whether this is the fork; the process that waits for it tells its status."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os.write(1, f"{status}\n".encode())
        return False
    for number, (path, flags) in enumerate([(os.devnull, os.O_RDONLY), *((file, os.O_WRONLY | os.O_CREAT) for file in request["files"])]):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    return True


def main() -> None:
    import pytest
    import torch  # noqa: F401

    request = next((made for line in iter(sys.stdin.buffer.readline, b"") if _fork_for(made := json.loads(line))), None)
    if request is None:
        return
    option, what, *arguments = request["command"]
    sys.path[0] = ""
    sys.argv = [option, *arguments]
    if option == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        assert (option, what) == ("-m", "pytest"), request["command"]
        sys.exit(pytest.main(arguments))


if __name__ == "__main__":
    main()
