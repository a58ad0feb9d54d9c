# SPDX-License-Identifier: Apache-2.0
"""Files that tests compile, kept from one run to the next: ~/.cache/lowbit/tests/<name>-<hash of the sources and the compiler>."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

STALE_DAYS = 14


def folder(name: str, sources: list[Path], *more: object, make: Callable[[Path], None] = lambda folder: None) -> Path:
    """Return the folder of these sources, g++ and whatever else its content depends on; `make` fills it once.

    Workers of one run share it: it is made aside and appears whole. Folders of other sources go after two weeks.
    """
    hash = hashlib.sha256(repr((_compiler(), *more)).encode())
    for path in sorted(sources):
        hash.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    wanted = _root() / f"{name}-{hash.hexdigest()[:16]}"
    if not wanted.exists():
        _root().mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=_root(), prefix=f".{name}-"))
        make(aside)
        try:
            aside.rename(wanted)
        except OSError:  # another process was first
            shutil.rmtree(aside)
    wanted.touch()
    for other in _root().glob(f"{name}-*"):
        if time.time() - other.stat().st_mtime > STALE_DAYS * 86400:
            shutil.rmtree(other, ignore_errors=True)
    return wanted


def _root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lowbit", "tests")


@functools.cache
def _compiler() -> str:
    if shutil.which("g++") is None:
        return ""
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout.partition("\n")[0]
