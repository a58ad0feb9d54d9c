# SPDX-License-Identifier: Apache-2.0
"""The registration of the device with torch: memory, allocator, guard, name, module, kernels, fallback, and lowbit's
own ops."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.utils import backend_registration

from lowbit.devices.private_use import autocast, backward_threads, claimed, inductor, overridden, shim
from lowbit.devices.private_use.device_module import DeviceModule
from lowbit.devices.private_use.fallback import fallback
from lowbit.devices.private_use.tensors import KERNELS
from lowbit.ops.registration import keep, register_key


def register(name: str, module: DeviceModule, start: Callable[[], None], asked_by: str) -> None:
    """Register the device, once per process.

    Args:
        name: the name of the device.
        module: becomes ``torch.<name>``.
        start: starts the device in the C++ core, where `_C.private_use` is its memory from then on.
        asked_by: the name of the caller, for errors.

    Raises:
        RuntimeError: another device uses the slot, a backward() has run, or there is no C++ compiler.
    """
    _check_free(name, asked_by)
    library = shim.built(asked_by)  # first, because it fails without a compiler, and then nothing has changed
    start()
    claimed.name = name
    shim.register(library)
    backend_registration._setup_privateuseone_for_python_backend(name, module)
    if "torch._inductor.codegen.common" in sys.modules:  # it may have asked for devices already
        inductor.register(name)
    _register_kernels()
    register_key("PrivateUse1")
    backward_threads.wait_at_exit()
    _check_autograd(asked_by)


def _check_free(name: str, asked_by: str) -> None:
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", name):
        raise RuntimeError(
            f"{asked_by}: torch has one place for a device of this kind in a process, and {taken!r} has taken it"
        )


def _register_kernels() -> None:
    aten = keep(torch.library.Library("aten", "IMPL"))
    for op, kernel in KERNELS.items():
        aten.impl(op.name().removeprefix("aten::"), kernel, "PrivateUse1")
    for key in ("Conjugate", "Negative"):  # the copy's host tensors keep lazy bits
        aten.impl("_copy_from", torch.library.fallthrough_kernel, key)
    overridden.register(aten)
    everything = keep(torch.library.Library("_", "IMPL"))
    everything.fallback(fallback, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    autocast.register(aten)


def _check_autograd(asked_by: str) -> None:
    """Raise an error if a backward() has run: the engine creates its threads, one per device, at the first backward()
    of a process, and never again."""
    try:
        torch.ones(1, device=claimed.name, requires_grad=True).sum().backward()
    except RuntimeError as error:
        raise RuntimeError(f"{asked_by}: must come before the first backward() of the process") from error
