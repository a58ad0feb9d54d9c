# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.fuzz`: fuzz for minutes or hours, or run one seed or one pasted text again. Exits with 1 if anything fails."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time

from .driver import OPS, Finding, Server, findings, isa_of, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--op", choices=OPS, action="append", help="this op alone (may be repeated)")
    parser.add_argument("--minutes", type=float, default=1.0, help="in all")
    parser.add_argument("--seed", help="run this seed alone (or several, one after the other: 5,8), not made smaller")
    parser.add_argument("--start", type=int, help="first of the seeds that are tried; default: random")
    parser.add_argument(
        "--isa", help="instruction set for every seed; default: half of the seeds the best, the rest the others in turn"
    )
    parser.add_argument("--file", help="run the text in this file as a case")
    parser.add_argument("--show", action="store_true", help="with --seed: print its text, run nothing")
    parser.add_argument("--shrink", type=float, default=20.0, help="seconds to make a finding smaller")
    options = parser.parse_args()
    if options.show:
        return _show(options.op[0], int(options.seed))
    with Server() as server:
        if options.file:
            return _file(server, options.file, options.isa or "")
        if options.seed:
            return _seeds(server, options.op[0], [int(seed) for seed in options.seed.split(",")], options.isa)
        return _fuzz(server, options)


def _show(op: str, seed: int) -> int:
    import importlib

    from .choices import Choices

    print(importlib.import_module(f"tests.fuzz.ops.{op}").generate(Choices(seed)))
    return 0


def _file(server: Server, file: str, isa: str) -> int:
    text = sys.stdin.read() if file == "-" else open(file).read()
    answer = server.ask("file", [{"text": text}], isa)[-1]
    print(answer["status"] if answer["status"] == "ok" else f"{answer['signature']}\n{answer['detail']}")
    return int(answer["status"] != "ok")


def _seeds(server: Server, op: str, seeds: list[int], isa: str | None) -> int:
    failed = list(run(server, op, seeds, isa if isa is not None else isa_of(seeds[-1])))
    for found, chosen, answer in failed:
        print(Finding(op, chosen, found, answer["status"], answer["signature"], answer["detail"], answer["text"]))
    return int(bool(failed))


def _fuzz(server: Server, options: argparse.Namespace) -> int:
    ops, began, count = options.op or OPS, time.monotonic(), 0
    start = random.SystemRandom().randrange(1 << 30) if options.start is None else options.start
    streams = {op: itertools.count(start) for op in ops}
    known: set[tuple[str, str]] = set()
    how = {"isa": options.isa, "seconds": min(30.0, options.minutes * 60 / len(ops)), "shrink_seconds": options.shrink}
    while time.monotonic() - began < options.minutes * 60:
        for op in ops:
            for found in findings(server, op, streams[op], known=known, **how):
                count += 1
                print(f"[{time.monotonic() - began:.0f} s] finding {count}\n{found}", flush=True)
    tried = ", ".join(f"{op} {next(stream) - start}" for op, stream in streams.items())
    print(f"{count} findings; seeds from {start}: {tried}")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
