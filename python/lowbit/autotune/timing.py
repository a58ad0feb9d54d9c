# SPDX-License-Identifier: Apache-2.0
"""Time calls against each other, with the CPU caches in the state that the model leaves them in.

Between two calls of a layer the model reads the rest of its weights. So before each call that is timed, as many bytes
of another buffer are read. It matters: a 384 x 1536 layer with one row (W8A8, one thread of a Sapphire Rapids) takes
26 us when it is called again and again, with its weight in L2; 126 us with the 10 MB of the other layers of MiniLM
between two calls; 188 us from memory. Nothing changes past the last cache, so no more than twice its size is read.

Rounds are interleaved, one sample of each call in a round and in changing order, so that a drift of the machine meets
all alike. Every second round is of the other half, and each half keeps its best sample of a call. On an idle machine
the halves soon agree on every call. Where other programs run, a call in which a thread waits for the system takes a
hundred times as long: rounds go on until the time is spent, and the difference of the halves is then the noise.
"""

from __future__ import annotations

import math
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
LEAST = 3  # samples of a call in each half, if there is time
AGREE = 1.05  # the halves agree on a call if their best samples differ by no more
BUDGET_S = 16.0  # budget of all calls of a model's layers, without the first sample of each half
HOPELESS = 3.0  # a call whose first samples take so many times those of the best of its kind gets no more
_UNKNOWN_CACHE = 64 << 20


@dataclass(frozen=True, slots=True)
class Timed:
    """A call; the bytes that the model reads between two of them; its kind, of which the best is wanted; the kind that
    it must beat; and a context around it, which is not timed."""

    call: Call
    bytes_between: int = 0
    kind: str = ""
    rival: str | None = None
    around: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True, slots=True)
class Times(Generic[Key]):
    """Best seconds of each call, and the ratio by which the halves differ on half of the calls or more."""

    seconds: dict[Key, float]
    noise: float = 1.0


class Timer:
    """Measures seconds per call. autoquant takes any object with this method, so that tests need no clock."""

    def best(self, calls: Mapping[Key, Timed], share: float = 1.0) -> Times[Key]:
        """Return the best seconds of one call each. ``share``: how much of BUDGET_S the rounds may take."""
        between = min(max((it.bytes_between for it in calls.values()), default=0), 2 * last_cache_bytes())
        # Written to: memory that never was is one page of zeros.
        buffer = torch.ones(between // 4, dtype=torch.float32, device="cpu")
        end = time.perf_counter() + share * BUDGET_S
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
        return Times(seconds, statistics.median(ratios) if ratios else 1.0)


def _ratios(halves: list[dict[Key, float]], order: list[Key]) -> list[float]:
    """The ratio between the two halves on each call."""
    return [max(half[key] for half in halves) / min(half[key] for half in halves) for key in order]


def _hopeful(calls: Mapping[Key, Timed], halves: list[dict[Key, float]]) -> list[Key]:
    """The calls that may be the best of their kind, and faster than their rivals."""
    first = {key: min(half[key] for half in halves) for key in calls}
    fastest: dict[str | None, float] = {}
    for key, timed in calls.items():
        fastest[timed.kind] = min(first[key], fastest.get(timed.kind, math.inf))

    def limit(timed: Timed) -> float:
        return HOPELESS * min(fastest[timed.kind], fastest.get(timed.rival, math.inf))

    return [key for key, timed in calls.items() if first[key] <= limit(timed)]


def _sample(timed: Timed, buffer: torch.Tensor) -> float:
    if timed.bytes_between:
        buffer[: timed.bytes_between // 4].sum()  # all threads sum, which evicts the caches of all cores
    with timed.around():
        start = time.perf_counter()
        timed.call()
        return time.perf_counter() - start


def last_cache_bytes() -> int:
    """Bytes of the largest cache of the first core, 64 MiB where the system does not say."""
    sizes = [_size(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=0) or _UNKNOWN_CACHE


def _size(path: Path) -> int:
    try:
        text = path.read_text().strip()
        return int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)
    except (OSError, ValueError):
        return 0
