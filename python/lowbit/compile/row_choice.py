# SPDX-License-Identifier: Apache-2.0
"""max_autotune of quantized layers: each call of `lowbit::linear` in a graph prefers the kernel row that is fastest for
its shape. Each shape is timed once, while the graph is compiled."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lowbit import _C
from lowbit.autotune.measuring import margin_of
from lowbit.autotune.rows import fitting_rows, forced_row
from lowbit.autotune.timing import Timed, Timer
from lowbit.compile.report import TimedProduct, microseconds
from lowbit.ops.fakes import described, name_of

_LINEAR = torch.ops.lowbit.linear.detached
_SHARE = 0.02  # fraction of autoquant's time for a whole model, per shape
_log = logging.getLogger("lowbit.compile")


class RowChoice:
    """Chooses kernel rows. Equal shapes are timed only once.

    Args:
        timer: measures times; tests pass one without a clock.
    """

    def __init__(self, timer: Any = None) -> None:
        self.timer = Timer() if timer is None else timer
        self._known: dict[tuple[Any, ...], TimedProduct] = {}

    def best(self, arguments: dict[str, Any], bytes_between: int) -> TimedProduct:
        """Return the times of the kernel rows that support a call.

        Args:
            arguments: the op's arguments by name, with graph nodes in place of tensors.
            bytes_between: bytes of weights that the model reads between two such calls.
        """
        x, weight = arguments["x"].meta["val"], arguments["weight"].meta["val"]
        numbers = [arguments[name] for name in ("n", "k", "format", "group_size", "asymmetric", "x_format")]
        m = math.prod(described(size) for size in x.shape[:-1])
        call = (m, *numbers, name_of(x.dtype), x.device.type)
        key = (*call, arguments["row"], forced_row(), torch.get_num_threads(), bytes_between)
        if key not in self._known:
            open_size = any(isinstance(size, torch.SymInt) for size in x.shape[:-1])
            named = f"{numbers[0]} x {numbers[1]}", f"{m} (any)" if open_size else str(m), name_of(x.dtype)
            self._known[key] = self._timed(named, call, arguments["row"], x, weight, bytes_between)
        return self._known[key]

    def _timed(
        self, named: tuple[str, str, str], call: tuple[Any, ...], row: int, x: Tensor, weight: Tensor, between: int
    ) -> TimedProduct:
        m, n, k, *numbers, _, device = call
        if device != "cpu":
            return TimedProduct(*named, left=f"on {device}: only rows of the CPU are timed")
        if forced_row():
            return TimedProduct(*named, left=f"{forced_row()} is forced")
        if row:
            return TimedProduct(*named, left="the layer prefers a row already")
        rows = fitting_rows(*call)
        if len(rows) < 2 or m == 0:
            return TimedProduct(*named, left=f"{rows[0]} alone can serve it" if len(rows) == 1 else "nothing to time")
        with unset_fake_temporarily(), torch.no_grad():
            activations = torch.randn(m, k, device="cpu").to(x.dtype)
            packed = torch.zeros(*weight.shape, dtype=torch.uint8, device="cpu")  # times do not depend on codes
            calls = {name: Timed(_call(activations, packed, (n, k, *numbers), name), between) for name in rows}
            times = self.timer.best(calls, _SHARE)
        best = min(times.seconds, key=times.seconds.__getitem__)
        taken = best if times.seconds[best] * margin_of(times.noise) < times.seconds[rows[0]] else rows[0]
        found = TimedProduct(*named, taken, microseconds(times.seconds), first=rows[0])
        _log.info("max_autotune: %s of %s", taken, found)
        return found


def _call(x: Tensor, packed: Tensor, op_args: tuple[Any, ...], row: str) -> Any:
    number = _C.row_number("linear", row)
    return lambda: _LINEAR(x, packed, *op_args, row=number)
