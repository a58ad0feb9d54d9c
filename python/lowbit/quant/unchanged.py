# SPDX-License-Identifier: Apache-2.0
"""The entries in dictionaries of modules that a kept result depends on, and the check that they have not changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from lowbit import _C

_PLAIN = (int, float, str, tuple)


class Attributes:
    """The public attributes that an object had when they were noted, which its forward may read beside its tensors."""

    def __init__(self, of: Any, without: Collection[str] = ()) -> None:
        inside = getattr(of, "__dict__", {})
        self.names = tuple(name for name in inside if not name.startswith("_") and name not in without)
        self.values = tuple(inside[name] for name in self.names)

    def hold(self, of: Any) -> bool:
        """Whether they are as they were. A number may be another object, as after unpickling."""
        for name, value in zip(self.names, self.values, strict=True):
            now = getattr(of, name, None)
            if now is not value and not (type(now) is type(value) and isinstance(now, _PLAIN) and now == value):
                return False
        return True


class Unchanged:
    """Entries of dictionaries, classes of modules, hooks and addresses that were noted, and whether all of them are as
    they were. That is asked in C, for each token; in Python it took longer than the kernels of a layer.

    A copy holds nothing, nor does an unpickled object: the entries are those of these modules.
    """

    def __init__(self) -> None:
        self._dicts: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._values: list[Any] = []
        self._modules: list[nn.Module] = []
        self._classes: list[type] = []
        self._hooks: list[dict[int, Any]] = []
        self._tensors: list[Tensor] = []
        self._addresses: list[int] = []

    def __reduce__(self) -> Any:
        return type(self), ()

    def note(self, entries: dict[str, Any], *keys: str) -> None:
        """Note these entries, also those that are not there."""
        for key in keys:
            self._dicts.append(entries)
            self._keys.append(key)
            self._values.append(entries.get(key))

    def note_module(self, module: nn.Module) -> None:
        """Note a module that will not be called: its class, and that nothing waits for its call."""
        self._modules.append(module)
        self._classes.append(type(module))
        self.note(module.__dict__, "_forward_hooks", "_forward_pre_hooks", "forward")
        self._hooks += (module._forward_hooks, module._forward_pre_hooks)

    def note_addresses(self, tensors: Sequence[Tensor]) -> None:
        """Note the addresses of the tensors, and hold them: freed memory could get the same address again."""
        self._tensors += tensors
        self._addresses += map(Tensor.data_ptr, tensors)

    def holds(self) -> bool:
        """Whether something was noted, and is as it was."""
        return (
            bool(self._values)
            and _C.entries_are(self._dicts, self._keys, self._values)
            and all(map(is_, map(type, self._modules), self._classes))
            and not any(self._hooks)
            and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
            and not _has_any_global_hook()
        )
