# SPDX-License-Identifier: Apache-2.0
"""The circumstances of a call: a forced kernel row, settings of torch, a number of threads, another thread, a forked child."""

from __future__ import annotations

import contextlib
import contextvars
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lowbit
from lowbit import _C


@contextlib.contextmanager
def forced(row: str | None) -> Iterator[None]:
    """Force a kernel row, which the last call of its op inside must have run; None: lowbit chooses."""
    with lowbit.force_kernel(row) if row else contextlib.nullcontext():
        yield
    op = row and max((op for op in _C.OPS if row.startswith(f"{op}_")), key=len)
    assert row is None or _C.last_kernel(op) == row


@contextlib.contextmanager
def ambient(setting: str = "") -> Iterator[None]:
    """Settings of torch that must not change a result: default dtype, default device, threads, grad mode."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        if setting.startswith("default dtype "):
            torch.set_default_dtype(getattr(torch, setting.removeprefix("default dtype ")))
        elif setting.startswith("default device "):
            stack.enter_context(torch.device(setting.removeprefix("default device ")))
        elif setting.startswith("threads "):
            torch.set_num_threads(int(setting.removeprefix("threads ")))
        elif setting == "inference mode":
            stack.enter_context(torch.inference_mode())
        elif setting:
            raise ValueError(f"ambient: unknown setting {setting!r}")
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            if setting.startswith("threads "):
                torch.set_num_threads(threads)


def same_for_any_threads(call: Callable[[], Tensor | Sequence[Tensor]], counts: Sequence[int] = (1, 2, 3)) -> list[Tensor]:
    """Return the results of a call, which must have the same bits for each of these numbers of threads."""
    results: list[list[Tensor]] = []
    for count in counts:
        with ambient(f"threads {count}"):
            made = call()
        results.append([made] if isinstance(made, Tensor) else list(made))
        same = [torch.equal(mine, first) for mine, first in zip(results[-1], results[0], strict=True)]
        assert all(same), f"{count} threads: other bits than with {counts[0]} in {[at for at, is_same in enumerate(same) if not is_same]}"
    return results[0]


def here(call: Callable[[], Any]) -> Any:
    """Run the call as it is."""
    return call()


def in_thread(call: Callable[[], Any]) -> Any:
    """Run the call in another thread; what it returns or raises, this does."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, call).result()


def in_child(call: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Run the call in a forked child and return its tensors; a child that hangs, crashes or raises is an error here.

    It hangs if all of its threads sleep for so long: one that waits for a processor of a loaded machine does not.
    Call lowbit alone in it: torch's own ops may wait for threads that the child does not have.
    """
    with tempfile.TemporaryFile() as file:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
            child = os.fork()
        if child == 0:
            try:
                torch.save(call(), file)
                file.flush()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        seen_awake = time.monotonic()
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            time.sleep(0.01)
            if _is_awake(child):
                seen_awake = time.monotonic()
            elif time.monotonic() - seen_awake > seconds:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise AssertionError("a forked child hangs")
        if status := os.waitstatus_to_exitcode(ended[1]):
            raise AssertionError(f"a forked child ends with {status}")
        file.seek(0)
        return torch.load(file)


def _is_awake(process: int) -> bool:
    """Whether a thread of it runs, or would if there were a processor."""
    for stat in Path(f"/proc/{process}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] in "RD":
                return True
    return False
