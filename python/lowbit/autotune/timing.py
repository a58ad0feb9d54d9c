# SPDX-License-Identifier: Apache-2.0
"""Comparison of the times of calls, with the CPU caches in the state that the model leaves them in.

Between two calls of a layer the model reads the rest of its weights. So before each timed call, the same number of
bytes of another buffer is read. This matters: a 384 x 1536 layer with one row (W8A8, one thread of a Sapphire Rapids)
takes 26 us when it is called repeatedly, with its weight in L2; 126 us when the 10 MB of the other layers of MiniLM are
read in between; and 188 us from memory. More than twice the size of the last-level cache makes no difference, so not
more is read.

Rounds are interleaved: each round takes one sample of every call, in random order, so that a drift of the machine
affects all calls equally. Rounds belong alternately to two halves, and each half keeps the best sample of each call. On
an idle machine the halves soon agree on every call. If other programs are running, a call whose thread has to wait for
the system takes a hundred times as long. Then rounds continue until the time is used up, and the difference between the
halves is the noise. Two halves may also agree on a call that waited in every round, so the share of the CPU time that
other programs took is measured too.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

Call = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)
LEAST = 3  # min number of samples of a call in each half, if there is time
AGREE = 1.05  # max ratio of the halves' best samples for which they agree on a call
BUSY = 0.2  # share of the CPU time; if other programs take more, times say nothing
BUDGET_S = 16.0  # time in seconds for all calls of a model's layers, excluding the first sample of each half
HOPELESS = 3.0  # a call slower by this ratio than the best of its kind is not sampled again
_UNKNOWN_CACHE = 64 << 20


@dataclass(frozen=True, slots=True)
class Timed:
    """A call to be timed.

    Args:
        call: the call.
        bytes_between: the number of bytes that the model reads between two such calls.
        kind: a name for calls of which only the best one matters.
        rival: the kind that the call has to beat, or None.
        around: returns a context for the call, which is not timed.
    """

    call: Call
    bytes_between: int = 0
    kind: str = ""
    rival: str | None = None
    around: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True, slots=True)
class Times(Generic[Key]):
    """The best time of each call in seconds, the noise, which is the median ratio between the halves, and the share of
    the machine's CPU time that other programs took meanwhile."""

    seconds: dict[Key, float]
    noise: float = 1.0
    taken: float = 0.0


class Timer:
    """Measures the time of calls. autoquant accepts any object with this method, so that tests do not need a clock."""

    def best(self, calls: Mapping[Key, Timed], share: float = 1.0) -> Times[Key]:
        """Return the best time of each call.

        Args:
            calls: the calls.
            share: the fraction of BUDGET_S that the rounds may take.
        """
        between = min(max((it.bytes_between for it in calls.values()), default=0), 2 * last_cache_bytes())
        # ones instead of empty or zeros: memory that was never written is mapped to a single page of zeros.
        buffer = torch.ones(between // 4, dtype=torch.float32, device="cpu")
        end = time.perf_counter() + share * BUDGET_S
        others = OtherPrograms()
        halves = [{key: _sample(it, buffer) for key, it in calls.items()} for _ in range(2)]
        order, shuffle = _hopeful(calls, halves), random.Random(0).shuffle
        done, ratios = 1, _ratios(halves, order)
        while order and time.perf_counter() < end and (done < LEAST or max(ratios) > AGREE):
            for half in halves:
                shuffle(order)
                for key in order:
                    half[key] = min(half[key], _sample(calls[key], buffer))
            done, ratios = done + 1, _ratios(halves, order)
        seconds = {key: min(half[key] for half in halves) for key in calls}
        return Times(seconds, statistics.median(ratios) if ratios else 1.0, others.share() or 0.0)


class OtherPrograms:
    """The CPU time that other programs take from now on."""

    def __init__(self) -> None:
        self._begin = _cpu_seconds()

    def share(self) -> float | None:
        """Return their share of the machine's CPU time, or None if the system does not say."""
        now = _cpu_seconds()
        if now is None or self._begin is None:
            return None
        total, idle, own = (after - before for after, before in zip(now, self._begin, strict=True))
        return max(0.0, total - idle - own) / max(total, 1e-9)


def _cpu_seconds() -> tuple[float, float, float] | None:
    """Return the CPU time of all cores, its idle part, and the part that this process has used, in seconds."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    per_second = os.sysconf("SC_CLK_TCK")
    return sum(ticks) / per_second, (ticks[3] + ticks[4]) / per_second, sum(os.times()[:2])


def _ratios(halves: list[dict[Key, float]], order: list[Key]) -> list[float]:
    """Return the ratio between the two halves for each call."""
    return [max(half[key] for half in halves) / min(half[key] for half in halves) for key in order]


def _hopeful(calls: Mapping[Key, Timed], halves: list[dict[Key, float]]) -> list[Key]:
    """Return the calls that may still be the best of their kind and beat their rivals."""
    first = {key: min(half[key] for half in halves) for key in calls}
    fastest: dict[str | None, float] = {}
    for key, timed in calls.items():
        fastest[timed.kind] = min(first[key], fastest.get(timed.kind, math.inf))

    def limit(timed: Timed) -> float:
        return HOPELESS * min(fastest[timed.kind], fastest.get(timed.rival, math.inf))

    return [key for key, timed in calls.items() if first[key] <= limit(timed)]


def _sample(timed: Timed, buffer: torch.Tensor) -> float:
    if timed.bytes_between:
        buffer[: timed.bytes_between // 4].sum()  # all threads read, which evicts the caches of all cores
    with timed.around():
        start = time.perf_counter()
        timed.call()
        return time.perf_counter() - start


def last_cache_bytes() -> int:
    """Return the size in bytes of the largest cache of the first core, or 64 MiB if it is unknown."""
    sizes = [_size(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=0) or _UNKNOWN_CACHE


def _size(path: Path) -> int:
    try:
        text = path.read_text().strip()
        return int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)
    except (OSError, ValueError):
        return 0
