# SPDX-License-Identifier: Apache-2.0
"""Comparing with the reference, and the settings of torch that a call is made under."""

from __future__ import annotations

import contextlib
import contextvars
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.testing import ROUNDOFF

UNIT = {torch.float64: 2.0**-53, **{getattr(torch, name): unit for name, unit in ROUNDOFF.items()}}
"""Largest relative error of rounding to the nearest value of a dtype."""


class Wrong(AssertionError):
    """lowbit differs from the reference."""


def unit_of_sums(dtype: torch.dtype) -> float:
    """The unit of the dtype that sums are accumulated in."""
    return UNIT[torch.float64 if dtype == torch.float64 else torch.float32]


def within(actual: Tensor, wanted: Tensor, allowed: Tensor | float, what: str) -> None:
    """Fail unless shapes agree and every element is within its budget; inf and nan must be where the reference has them."""
    if actual.shape != wanted.shape:
        raise Wrong(f"{what}: shape {list(actual.shape)}, wanted {list(wanted.shape)}")
    actual, wanted = actual.detach(), wanted.detach().double()
    allowed = torch.as_tensor(allowed, dtype=torch.float64).expand(wanted.shape)
    largest = torch.finfo(actual.dtype).max if actual.is_floating_point() else torch.inf
    overflows = (wanted.abs() + allowed > largest) & wanted.isfinite()
    got = actual.double()
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    bad = ~(same | ((got - wanted).abs() <= allowed) | overflows)
    if bad.any():
        at = tuple(int(index) for index in bad.nonzero()[0])
        finite = "finite" if wanted[at].isfinite() else str(wanted[at].item())
        found = "finite" if got[at].isfinite() else str(got[at].item())
        raise Wrong(
            f"{what} is {found}, wanted {finite}: element {list(at)} is {got[at].item():.9g}, wanted {wanted[at].item():.9g} "
            f"+- {allowed[at].item():.3g}; {int(bad.sum())} of {bad.numel()} elements are off"
        )


def refused(call: Callable[[], Any], what: str) -> None:
    """Fail unless the call raises (ValueError, TypeError, RuntimeError or their kin)."""
    try:
        call()
    except (ValueError, TypeError, RuntimeError, LookupError, NotImplementedError):
        return
    raise Wrong(f"{what} was accepted")


def taken_by(call: Callable[[], Any]) -> bool:
    """Whether torch takes what we are about to give to lowbit."""
    try:
        call()
    except Exception:
        return False
    return True


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


def here(call: Callable[[], Any]) -> Any:
    """Run the call as it is."""
    return call()


def in_thread(call: Callable[[], Any]) -> Any:
    """Run the call in another thread; what it returns or raises, this does."""
    results: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,))
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return results[0]


def in_child(call: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Run the call in a forked child and return its tensors; a child that hangs, crashes or raises is an error here.

    It hangs if all of its threads sleep for so long: one that waits for a processor of a loaded machine does not.
    Call lowbit alone in it: torch's own ops may wait for threads that the child does not have.
    """
    with tempfile.TemporaryFile() as file:
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
                raise Wrong("a forked child hangs")
        if status := os.waitstatus_to_exitcode(ended[1]):
            raise Wrong(f"a forked child ends with {status}")
        file.seek(0)
        return torch.load(file)


def _is_awake(process: int) -> bool:
    """Whether a thread of it runs, or would if there were a processor."""
    for stat in Path(f"/proc/{process}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] in "RD":
                return True
    return False
