# SPDX-License-Identifier: Apache-2.0
"""Tests of the CPU's ops on another device: LOWBIT_TEST_DEVICE=lowbit_sim:1 runs them there, test code unchanged.

Every call of an op, of `_C` or of torch's, gets its tensors copied to the device, with their storages as they are, runs
there, and has what it wrote copied back. The rows that tests walk are those of the device; an op that has none there
stays on the CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from tests import internals
from torch import Tensor

from lowbit import _C, devices, testing

_FUNCTIONS = (
    "quantize", "repack", "all_finite", "encode_state", "decode_state",
    "blocks_linear", "blocks_dequantize", "int8_linear",
    "block_classes",
)  # fmt: skip
_INTERNALS = ("decode", "score_program_eval", "score_program_backward")
OF_THE_CPU = {"test_odd_objects", "test_registration", "test_a_kept_program_sees_what_changes"}
"""Files of tests/ops about numpy arrays and about the CPU's kernels at torch's dispatcher, and a test of tensors that an
op keeps: it would keep the copies."""
_library = torch.library.Library("lowbit", "IMPL")
ran: set[str] = set()
"""Every row that ran there."""


class _Copies:
    """The CPU tensors of one call on the device: views of one storage stay views of one storage."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.storages: dict[int, tuple[Tensor, Tensor]] = {}  # as bytes: here, there

    def there(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self.there(item) for item in value]
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            return value
        storage = value.untyped_storage()
        if storage._cdata not in self.storages:
            here = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
            self.storages[storage._cdata] = here, here.to(self.device)
        memory = self.storages[storage._cdata][1].untyped_storage()
        copy = torch.empty(0, dtype=value.dtype, device=self.device)
        return copy.set_(memory, value.storage_offset(), value.shape, value.stride())

    def write_back(self) -> None:
        for here, there in self.storages.values():
            here.copy_(there)


def _back(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_back(item) for item in value)
    return value.cpu() if isinstance(value, Tensor) else value


def _note() -> None:
    ran.update(row for op in _C.OPS if (row := _C.last_kernel(op)))


def _wrapped(function: Any, device: torch.device) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        copies = _Copies(device)
        result = function(*copies.there(args), **{name: copies.there(value) for name, value in options.items()})
        copies.write_back()
        _note()
        return _back(result)

    return call


class _Step:
    """`_C.OptimStep` there: prepared with copies, which are taken back after the step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.copies = _Copies(_Step.device)
        args, options = self.copies.there(args), {name: self.copies.there(value) for name, value in options.items()}
        self.step = _Step.there(*args, **options)

    def run(self) -> None:
        self.step.run()
        self.copies.write_back()
        _note()


def use(name: str) -> None:
    """Let every op run on the device of this name from now on."""
    device = torch.device(name)
    testing.cases.device = device.type

    def runs_there(function: str) -> bool:
        function = {"embedding": "dequantize"}.get(function, function)  # by rows of another name
        return devices.has_kernels(device) or any(function.startswith(op) and testing.rows(op) for op in _C.OPS)

    for function in filter(runs_there, _FUNCTIONS):
        setattr(_C, function, _wrapped(getattr(_C, function), device))
    for function in filter(runs_there, _INTERNALS):
        call = _wrapped(lambda *args, name=function, **options: getattr(internals.loaded(), name)(*args, **options), device)
        setattr(internals, function, call)
    if runs_there("optim_step"):
        _Step.device, _Step.there = device, _C.OptimStep
        _C.OptimStep = _Step
    for row in _C.register_torch():
        name = str(row["op"]).removeprefix("lowbit::")
        if not runs_there(name):
            continue
        for entry in getattr(torch.ops.lowbit, name).overloads():
            op = getattr(getattr(torch.ops.lowbit, name), entry)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says that a kernel takes the place of another
                _library.impl(op.name(), _wrapped(op, device), "CPU")
