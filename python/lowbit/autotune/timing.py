# SPDX-License-Identifier: Apache-2.0
"""Time calls against each other, in the state of the caches that they will meet in the model.

Between two calls of a layer the model reads the rest of its weights. So before each call that is timed, as many bytes
of another buffer are read. It matters: a 384 x 1536 layer with one row (W8A8, one thread of a Sapphire Rapids) takes
26 us when it is called again and again, with its weight in L2; 126 us with the 10 MB of the other layers of MiniLM
between two calls; 188 us from memory. Nothing changes past the last cache, so no more than twice its size is read.

Rounds are interleaved, one sample of each call in a round and in changing order, so that a drift of the machine meets
all alike. The best sample of each counts once it was seen twice: rounds go on until the two best samples of every call
agree. On an idle machine that is soon; where other programs run, a call that a thread of waits for the system takes a
hundred times as long, and three rounds say nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

Call = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)
ROUNDS = (5, 60)  # at least and at most
SEEN_TWICE = 1.03  # ratio of the two best samples of a call
BUDGET_S = 8.0  # after so long a set of calls gets no more rounds than the least
HOPELESS = 2.0  # a call whose first two samples take so many times those of the best of its kind gets no more
_UNKNOWN_CACHE = 64 << 20


@dataclass(frozen=True, slots=True)
class Timed:
    """A call, how many bytes the model reads between two of them, of which others it has to be the best, and a context
    that it runs in and that is not timed."""

    call: Call
    bytes_between: int = 0
    kind: str = ""
    around: Callable[[], AbstractContextManager[None]] = nullcontext


class Timer:
    """Measures seconds per call. autoquant takes any object with this method, so that tests need no clock."""

    def best(self, calls: Mapping[Key, Timed]) -> dict[Key, float]:
        """Return the best seconds of one call each, from interleaved rounds."""
        between = min(max((it.bytes_between for it in calls.values()), default=0), 2 * last_cache_bytes())
        # Written: all of memory that never was is one page of zeros.
        buffer = torch.ones(between // 4, dtype=torch.float32, device="cpu")
        start = time.perf_counter()
        two = {key: sorted((_sample(it, buffer), _sample(it, buffer))) for key, it in calls.items()}
        fastest: dict[str, float] = {}
        for key, timed in calls.items():
            fastest[timed.kind] = min(two[key][0], fastest.get(timed.kind, two[key][0]))
        order = [key for key, timed in calls.items() if two[key][0] <= HOPELESS * fastest[timed.kind]]
        shuffle = random.Random(0).shuffle
        for done in range(ROUNDS[1]):
            seen_twice = all(two[key][1] <= SEEN_TWICE * two[key][0] for key in order)
            if done >= ROUNDS[0] and (seen_twice or time.perf_counter() - start > BUDGET_S):
                break
            shuffle(order)
            for key in order:
                two[key] = sorted((*two[key], _sample(calls[key], buffer)))[:2]
        return {key: best for key, (best, _) in two.items()}


def _sample(timed: Timed, buffer: torch.Tensor) -> float:
    if timed.bytes_between:
        buffer[: timed.bytes_between // 4].sum()  # by all threads: the caches of all cores
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
