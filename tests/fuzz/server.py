# SPDX-License-Identifier: Apache-2.0
"""Runs cases, each batch in a forked child: `python -m tests.fuzz.server` reads requests and writes answers, one JSON a line.

The server imports torch and lowbit and then runs nothing, so a child starts in milliseconds, without threads, plans or kept programs
of earlier cases, and takes the instruction set of its request. A child that does not answer in time is killed: a hang.

    request  {"op", "isa", "seconds", "cases": [{"seed"} or {"choices"} or {"text"}]}
    answer   [{"status": ok, fail, crash or hang, "signature", "detail", "text", "choices", "seconds"}], up to the first crash or hang
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import linecache
import os
import re
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from typing import Any

from tests import internals
from tests.fuzz.choices import Choices
from tests.fuzz.driver import OPS


def main() -> None:
    import torch

    import lowbit

    importlib.import_module("tests.fuzz.check")
    for op in OPS:
        importlib.import_module(f"tests.fuzz.ops.{op}")
    torch.vmap(torch.sin)(torch.zeros(1))  # imports what is imported at first use
    names = "flex_attention create_block_mask scaled_dot_product_attention QuantizedKVCache linear optim"
    for name in names.split():
        getattr(lowbit, name)
    internals.loaded()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what cases print is no answer
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(_batch(**request)) + "\n")
        answers.flush()


def _batch(op: str, isa: str, seconds: float, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            os.close(reader)
            _child(op, isa, seconds, cases, writer, errors.fileno())
        os.close(writer)
        answers, hung = _read(reader, seconds)
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    finished = [answer for answer in answers if "status" in answer]
    if len(finished) < len(cases):
        text = next((answer for answer in reversed(answers) if "status" not in answer), {})
        kind = "hang" if hung else "crash"
        name = f"no answer in {seconds:g} s" if hung else _ending(status)
        finished.append(
            {**text, "status": kind, "signature": f"{kind}: {name}", "detail": said[-6000:], "seconds": 0.0}
        )
    return finished


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit {os.waitstatus_to_exitcode(status)}"


def _read(reader: int, seconds: float) -> tuple[list[dict[str, Any]], bool]:
    """All lines that the child writes, until it ends or is silent for too long."""
    received, hung = b"", False
    while True:
        if not select.select([reader], [], [], seconds)[0]:
            hung = True
            break
        part = os.read(reader, 1 << 16)
        if not part:
            break
        received += part
    return [json.loads(line) for line in received.split(b"\n")[:-1]], hung


def _child(op: str, isa: str, seconds: float, cases: list[dict[str, Any]], writer: int, errors: int) -> None:
    os.setpgid(0, 0)  # with all its own children
    os.dup2(errors, 2)
    os.dup2(errors, 1)
    faulthandler.enable()
    if isa:
        os.environ["LOWBIT_ISA"] = isa
    with os.fdopen(writer, "w") as answers:

        def answer(line: dict[str, Any]) -> None:
            answers.write(json.dumps(line) + "\n")
            answers.flush()

        for case in cases:
            faulthandler.dump_traceback_later(max(seconds - 1, 1))
            answer(_run(op, case, answer))
    os._exit(0)


def _run(op: str, case: dict[str, Any], answer: Any) -> dict[str, Any]:
    choices = Choices(case.get("seed"), case.get("choices"))
    text = case.get("text") or importlib.import_module(f"tests.fuzz.ops.{op}").generate(choices)
    known = {"text": text, "choices": choices.made}
    answer(known)  # before it runs: a crash says no more
    name, began = f"<case {op}>", time.monotonic()
    linecache.cache[name] = len(text), None, text.splitlines(True), name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(
                compile(text, name, "exec", dont_inherit=True), {"__name__": "fuzz_case"}
            )  # our annotations are not theirs
    except Exception as error:
        detail = "".join(traceback.format_exception(error))
        signature = f"{type(error).__name__}: {_without_numbers(str(error))}"
        seconds = time.monotonic() - began
        return {**known, "status": "fail", "signature": signature, "detail": detail[-6000:], "seconds": seconds}
    return {"status": "ok", "seconds": time.monotonic() - began}


def _without_numbers(message: str) -> str:
    first = message.strip().splitlines()[0] if message.strip() else ""
    return re.sub(r"-?\b\d[\d.]*(e[+-]?\d+)?\b", "#", first.partition(": element [")[0])[:140]


if __name__ == "__main__":
    main()
