# SPDX-License-Identifier: Apache-2.0
"""Calls that must not crash or hang, whatever they return."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
from tests import internals
from tests.settings import in_child

from lowbit.score.program import ProgramBuilder


def no_crash(call: Callable[[], object]) -> None:
    """Run the call; any error will do."""
    with contextlib.suppress(ValueError, TypeError, LookupError, RuntimeError, BufferError):
        call()


def _program(number: int, length: int) -> list[int]:
    p = ProgramBuilder()
    value = p.op("score")
    for step in range(length):
        value = p.op("tanh", p.op("add", value, p.constant(float(number * length + step))))
    return p.finish(value)


def forks_while_a_thread_traces(forks: int) -> None:
    """A thread parses programs, one after the other; children forked meanwhile parse one of their own."""
    done, scores = threading.Event(), torch.zeros(1, 1).clone()  # torch's first op has guards of its own that a child waits at

    def parse() -> None:
        number = 0
        while not done.is_set():
            number += 1
            internals.score_program_eval(_program(number, 150), [], 0, 0, 0, 0, scores.clone())

    thread = threading.Thread(target=parse)
    thread.start()
    try:
        for number in range(forks):
            in_child(lambda: internals.score_program_eval(_program(-number - 1, 2), [], 0, 0, 0, 0, scores), seconds=5)
    finally:
        done.set()
        thread.join()


def forks_during_the_first_call(tries: int) -> None:
    """In children where lowbit has not run: a thread makes the first call, while another child is forked, which calls too."""
    scores, long, short = torch.zeros(1, 1).clone(), _program(1, 150), _program(-1, 2)

    def first_call(delay: float) -> None:
        thread = threading.Thread(target=internals.score_program_eval, args=(long, [], 0, 0, 0, 0, scores.clone()))
        thread.start()
        time.sleep(delay)
        in_child(lambda: internals.score_program_eval(short, [], 0, 0, 0, 0, scores), seconds=2)
        thread.join()

    for number in range(tries):
        in_child(partial(first_call, number % 30 * 1e-4))
