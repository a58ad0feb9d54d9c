# SPDX-License-Identifier: Apache-2.0
"""Runs seeds of an op on a server, confirms what fails alone, and makes it smaller."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .choices import shrink

ROOT = Path(__file__).parents[2]
OPS = tuple(
    "flex flex_state sdpa decode kv_cache linear quantize optim optim_state score_program library boundary".split()
)
ISAS = ("", "avx2", "scalar", "avx512")  # "" is the best that the machine has; one that it lacks is the next lower
BATCH = 16
CASE_SECONDS = 60.0


@dataclass(frozen=True)
class Finding:
    """A case that fails: the smallest text that was found, and the seeds that it comes from (several: only together)."""

    op: str
    isa: str
    seeds: tuple[int, ...]
    status: str
    signature: str
    detail: str
    text: str

    def __str__(self) -> str:
        isa = f"LOWBIT_ISA={self.isa} " if self.isa else ""
        seeds = ",".join(map(str, self.seeds))
        bar = "-" * 100
        return (
            f"{bar}\n{self.op}: {self.signature}\n{isa}python -m tests.fuzz --op {self.op} --seed {seeds}\n{bar}\n{self.text.rstrip()}\n{bar}\n"
            f"{self.detail.rstrip()}\n"
        )


class Server:
    """One server process, started at the first request."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(
        self, op: str, cases: Sequence[dict[str, Any]], isa: str = "", seconds: float = CASE_SECONDS
    ) -> list[dict[str, Any]]:
        if self._process is None:
            command = [sys.executable, "-m", "tests.fuzz.server"]
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"op": op, "isa": isa, "seconds": seconds, "cases": list(cases)}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server of the fuzzer ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def isa_of(seed: int) -> str:
    """The instruction set that a seed runs on: half of them the best one."""
    return ISAS[max(seed % 6 - 2, 0)]


def run(
    server: Server, op: str, seeds: Sequence[int], isa: str | None = None
) -> Iterator[tuple[tuple[int, ...], str, dict[str, Any]]]:
    """Yield (seeds, isa, answer) of what fails. Several seeds: none fails alone, but they do one after the other."""
    by_isa: dict[str, list[int]] = {}
    for seed in seeds:
        by_isa.setdefault(isa_of(seed) if isa is None else isa, []).append(seed)
    for chosen, left in by_isa.items():
        while left:
            answers = server.ask(op, [{"seed": seed} for seed in left], chosen)
            done, left = left[: len(answers)], left[len(answers) :]
            for index, (seed, answer) in enumerate(zip(done, answers, strict=True)):
                if answer["status"] != "ok":
                    yield *_confirmed(server, op, chosen, done[: index + 1], answer), answer


def _confirmed(
    server: Server, op: str, isa: str, seeds: list[int], answer: dict[str, Any]
) -> tuple[tuple[int, ...], str]:
    """The last seed if it fails alone, else the fewest before it that make it fail."""
    before, kept = seeds[:-1], seeds[-1:]
    if server.ask(op, [{"seed": kept[0]}], isa)[-1]["status"] != "ok":
        return tuple(kept), isa
    while before:
        half = before[len(before) // 2 :] if len(before) > 1 else []
        answers = server.ask(op, [{"seed": seed} for seed in half + kept], isa)
        if answers[-1]["status"] != "ok":
            before = half
        elif len(before) > 1:
            kept, before = half + kept, before[: len(before) // 2]
        else:
            kept, before = before + kept, []
    return tuple(kept), isa


def smallest(
    server: Server, op: str, isa: str, seeds: tuple[int, ...], answer: dict[str, Any], seconds: float
) -> Finding:
    """Shrink a finding of one seed; a case that fails in another way does not count."""

    def fails(choices: list[int]) -> bool:
        found = server.ask(op, [{"choices": choices}], isa)[-1]
        if found["status"] != answer["status"] or found["signature"] != answer["signature"]:
            return False
        best[0] = found
        return True

    best = [answer]
    if len(seeds) == 1 and seconds > 0 and answer["status"] != "hang":
        shrink(answer["choices"], fails, seconds)
    found = best[0]
    return Finding(op, isa, seeds, found["status"], answer["signature"], found["detail"], found["text"])


def findings(
    server: Server, op: str, seeds: Iterable[int], *, isa: str | None = None, seconds: float | None = None, shrink_seconds: float = 20.0,
    known: set[tuple[str, str]] | None = None,
) -> Iterator[Finding]:  # fmt: skip
    """Yield one finding for each way (unless ``known``) in which cases of these seeds fail, until they end or the time is up."""
    known = set() if known is None else known
    deadline = None if seconds is None else time.monotonic() + seconds
    ended = False
    waiting = iter(seeds)
    while not ended:
        batch = [seed for _, seed in zip(range(BATCH), waiting)]
        ended = len(batch) < BATCH
        for found, chosen, answer in run(server, op, batch, isa):
            if (op, answer["signature"]) not in known:
                known.add((op, answer["signature"]))
                yield smallest(server, op, chosen, found, answer, shrink_seconds)
        ended |= deadline is not None and time.monotonic() > deadline
