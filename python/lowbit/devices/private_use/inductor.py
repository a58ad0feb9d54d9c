# SPDX-License-Identifier: Apache-2.0
"""Inductor has no code generator for the device, and says so.

When Inductor is first used, it asks ``torch.<device>`` for the classes that generate code (``Scheduling`` and others),
and it looks for the operations of the device in a table of its own. Both are answered here, by classes that raise.
"""

from __future__ import annotations

from typing import Any

from lowbit.devices.private_use import claimed


class NoCodegen:
    """In the place of a class that generates code."""

    supports_caching = False  # Inductor looks before it makes one

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"torch.compile: Inductor has no code generator for {claimed.name}; backend='aot_eager' compiles for it"
        )

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> NoCodegen:
        """Raise NotImplementedError, as the constructor does. Inductor makes its wrappers by this method."""
        return cls()


def register(name: str) -> None:
    """Add the device to Inductor's tables. This imports Inductor."""
    from torch._inductor.codegen import common

    common.register_device_op_overrides(name, common.DeviceOpOverrides())
    common.register_backend_for_device(name, NoCodegen, NoCodegen, NoCodegen)
