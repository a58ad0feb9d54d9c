# SPDX-License-Identifier: Apache-2.0
"""Earlier measurements, stored in a file in the user's cache folder.

An entry has all times of one set of calls, which were measured in the same rounds. It is either reused as a whole or
measured again. Its key has everything that the times depend on: machine, threads, instruction set, versions, shapes.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import warnings
from pathlib import Path
from typing import Any

import torch

from lowbit import _C
from lowbit.documents.whole_file import write_whole

SCHEMA = 1


def machine() -> dict[str, str]:
    """Return the properties of machine and software that times depend on."""
    return {
        "cpu": _cpu_model(),
        "isa": str(_C.isa()["chosen"]),
        "threads": str(_C.threads()["count"]),
        "lowbit": _C.version,
        "torch": str(torch.__version__),
        "onednn": _C.onednn.facts()["version"],
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def default_path() -> Path:
    """Return the path of the file in the user's cache folder, as defined by XDG."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowbit" / "autoquant.json"


class KeptTimes:
    """Sets of times in seconds by key, which are read once, and written after each new set.

    Args:
        cache: None for the file in the user's cache folder, False for no file, or the path of a file.

    Raises:
        TypeError: ``cache`` is anything else.
    """

    def __init__(self, cache: str | os.PathLike[str] | bool | None = None) -> None:
        if cache is True or not isinstance(cache, (str, os.PathLike, bool, type(None))):
            raise TypeError(f"autoquant: cache must be None, False or a path, got {cache!r}")
        self.path = None if cache is False else default_path() if cache is None else Path(cache)
        self._machine = machine()
        self._sets = self._read()

    def key(self, **call: Any) -> str:
        """Return the key for a set of calls."""
        return ", ".join(f"{name} {value}" for name, value in (self._machine | call).items())

    def get(self, key: str, names: list[str]) -> dict[str, float] | None:
        """Return the times of a set if it has all these names, or None."""
        kept = self._sets.get(key, {})
        return {name: kept[name] for name in names} if all(name in kept for name in names) else None

    def put(self, key: str, seconds: dict[str, float]) -> None:
        """Store a set of times, in the file too."""
        self._sets[key] = seconds
        if self.path is None:
            return
        self._sets = self._read(warn=False) | {key: seconds}  # another process may have written to the file
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps({"schema": SCHEMA, "sets": self._sets}, indent=1))
        except OSError as error:
            warnings.warn(f"autoquant: times are not kept, {self.path} cannot be written: {error}", stacklevel=2)
            self.path = None

    def _read(self, warn: bool = True) -> dict[str, dict[str, float]]:
        if self.path is None or not self.path.exists():
            return {}
        try:
            kept = json.loads(self.path.read_text())
            if kept["schema"] != SCHEMA:
                raise ValueError(f"schema {kept['schema']}, wanted {SCHEMA}")
            return {key: {name: float(value) for name, value in item.items()} for key, item in kept["sets"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if warn:
                warnings.warn(f"autoquant: {self.path} is not read, times are measured anew: {error!r}", stacklevel=2)
            return {}
