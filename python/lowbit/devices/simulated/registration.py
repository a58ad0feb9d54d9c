# SPDX-License-Identifier: Apache-2.0
"""Make torch know the device: memory, allocator and guard, name and module, kernels, the fallback, lowbit's own ops."""

from __future__ import annotations

import torch
from torch.utils import backend_registration

from lowbit import _C
from lowbit.devices import places
from lowbit.devices.simulated import autocast, overridden, shim
from lowbit.devices.simulated.device_module import DeviceModule
from lowbit.devices.simulated.fallback import fallback
from lowbit.devices.simulated.name import DEVICE
from lowbit.devices.simulated.tensors import KERNELS
from lowbit.ops.registration import keep, register_key


def register(devices: int, bytes_each: int) -> None:
    """Register everything; once per process."""
    _check_free()
    shim.load(devices)  # first: it may fail for want of a compiler, and then nothing has changed
    _C.simulated.start(devices, bytes_each)
    backend_registration._setup_privateuseone_for_python_backend(DEVICE, DeviceModule())
    _register_kernels()
    register_key("PrivateUse1")
    places.serve(DEVICE)
    _check_autograd()


def _check_free() -> None:
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", DEVICE):
        raise RuntimeError(
            f"simulated.enable: torch has one place for a device of this kind in a process, and {taken!r} has taken it"
        )


def _register_kernels() -> None:
    aten = keep(torch.library.Library("aten", "IMPL"))
    for op, kernel in KERNELS.items():
        aten.impl(op.name().removeprefix("aten::"), kernel, "PrivateUse1")
    for key in ("Conjugate", "Negative"):  # a lazy bit goes into the copy, where the host tensor carries it on
        aten.impl("_copy_from", torch.library.fallthrough_kernel, key)
    overridden.register(aten)
    everything = keep(torch.library.Library("_", "IMPL"))
    everything.fallback(fallback, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    autocast.register(aten)


def _check_autograd() -> None:
    """The engine makes its threads, one per device, at the first backward() of a process, and never again."""
    x = torch.ones(1, device=DEVICE, requires_grad=True)
    try:
        (2 * x).sum().backward()
    except RuntimeError as error:
        raise RuntimeError("simulated.enable: must come before the first backward() of the process") from error
