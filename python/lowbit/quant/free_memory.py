# SPDX-License-Identifier: Apache-2.0
"""available_bytes: how much memory is free for programs, within the limits of containers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_UNKNOWN = 2**63 - 1


def available_bytes() -> int:
    """Return how much memory is free for programs, within the limit of a container; a very large number where the
    system does not tell (no Linux)."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return _UNKNOWN
    free = next(int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines() if line[:12] == "MemAvailable")
    return min([free, *_free_in_groups()])


def _free_in_groups() -> Iterator[int]:
    """Yield what the limits of this process's control groups, of either version, leave. Pages of files that can be
    dropped count as free."""
    for folder, limit, used, cached in _groups():
        texts = [(folder / name).read_text() for name in (limit, used, "memory.stat") if (folder / name).exists()]
        if len(texts) == 3 and texts[0].strip() != "max":
            stat = dict(line.split() for line in texts[2].splitlines() if len(line.split()) == 2)
            yield int(texts[0]) - int(texts[1]) + int(stat.get(cached, 0))


def _groups() -> Iterator[tuple[Path, str, str, str]]:
    """Yield the folder of each control group of memory, and the names of its limit, its use and its file pages. In a
    container, the path that the process is told may not exist, and the root is its own group."""
    own = Path("/proc/self/cgroup")
    for line in own.read_text().splitlines() if own.exists() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        inside = root / path.lstrip("/")
        for folder in {root, inside, *(parent for parent in inside.parents if root in parent.parents)}:
            yield folder, *names
