# SPDX-License-Identifier: Apache-2.0
"""`torch.<device>`: the functions that torch expects in a device's module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit import _C
from lowbit.devices.private_use import claimed, inductor, memory


class DeviceModule:
    """The functions that torch and programs call on every device, with the names that they have in `torch.cuda`.

    Random numbers come from the CPU's generator; the device has none.
    """

    Stream, Event = torch.Stream, torch.Event
    PythonWrapperCodegen = CppWrapperCodegen = WrapperFxCodegen = inductor.NoCodegen

    @property
    def Scheduling(self) -> type:  # noqa: N802
        """Inductor asks for this when it is first used."""
        inductor.register(claimed.name)
        return inductor.NoCodegen

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def init(self) -> None:
        pass

    def _lazy_init(self) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return _C.private_use.device_count()

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(_index(device))

    def get_device_name(self, device: Any = None) -> str:
        return self.name_of(_index(device))

    def name_of(self, index: int) -> str:
        """Return the name of a device. Each kind of device defines it."""
        raise NotImplementedError

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize(_index(device))

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(_index(device))

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:  # torch.manual_seed calls it after seeding the CPU
        pass

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.default_generator.set_state(state)

    def memory_allocated(self, device: Any = None) -> int:
        return _C.private_use.usage(_index(device))["live_bytes"]

    def max_memory_allocated(self, device: Any = None) -> int:
        return _C.private_use.usage(_index(device))["peak_bytes"]

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        _C.private_use.reset_peak(_index(device))

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        usage = _C.private_use.usage(_index(device))
        return usage["capacity"] - usage["live_bytes"], usage["capacity"]

    def empty_cache(self) -> None:
        pass

    class device:
        """A context manager that makes a device the current one."""

        def __init__(self, device: Any) -> None:
            self.index = _index(device)

        def __enter__(self) -> None:
            self.before = torch.accelerator.current_device_index()
            torch.accelerator.set_device_index(self.index)

        def __exit__(self, *exception: object) -> None:
            torch.accelerator.set_device_index(self.before)

    class device_of(device):
        """The same with the device of a tensor."""

        def __init__(self, tensor: Tensor) -> None:
            super().__init__(tensor.device if tensor.device.type == claimed.name else None)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    return memory.index_of(None if device is None else torch.device(device))
