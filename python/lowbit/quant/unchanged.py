# SPDX-License-Identifier: Apache-2.0
"""Checks that the modules that a cached result depends on have not changed since it was computed."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from lowbit import _C

_PLAIN = (int, float, str, tuple)
_SAMPLED = 16  # elements of a tensor
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Attributes:
    """A snapshot of an object's public attributes, which its forward may read besides its tensors."""

    def __init__(self, of: Any, without: Collection[str] = ()) -> None:
        inside = getattr(of, "__dict__", {})
        self.names = tuple(name for name in inside if not name.startswith("_") and name not in without)
        self.values = tuple(inside[name] for name in self.names)

    def hold(self, of: Any) -> bool:
        """Return whether the attributes are unchanged. Numbers, strings and tuples are compared by value, since they
        are other objects after unpickling."""
        for name, value in zip(self.names, self.values, strict=True):
            now = getattr(of, name, None)
            if now is not value and not (type(now) is type(value) and isinstance(now, _PLAIN) and now == value):
                return False
        return True


class Unchanged:
    """A record of dictionary entries, classes of modules, hooks and addresses, and a check that all are unchanged.

    The check runs for every token, so entries are compared in C; in Python it took longer than the kernels of a layer.
    Copies and unpickled objects are empty, because the entries belong to the original modules.
    """

    def __init__(self) -> None:
        self._dicts: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._values: list[Any] = []
        self._modules: list[nn.Module] = []
        self._classes: list[type] = []
        self._hooks: list[dict[int, Any]] = []
        self._compared: list[dict[str, Any]] = []
        self._compared_keys: list[str] = []
        self._equals: list[Any] = []
        self._copied: list[Tensor] = []
        self._versions: list[int] = []
        self._samples: list[np.ndarray] = []
        self._sampled: list[bytes] = []
        self._tensors: list[Tensor] = []
        self._addresses: list[int] = []

    def __reduce__(self) -> Any:
        return type(self), ()

    def note(self, entries: dict[str, Any], *keys: str) -> None:
        """Record these entries of a dictionary, including missing ones."""
        for key in keys:
            self._dicts.append(entries)
            self._keys.append(key)
            self._values.append(entries.get(key))

    def note_module(self, module: nn.Module) -> None:
        """Record a module that will not be called: its class, and that it has no hooks."""
        self._modules.append(module)
        self._classes.append(type(module))
        self.note(module.__dict__, "_forward_hooks", "_forward_pre_hooks", "forward")
        self._hooks += (module._forward_hooks, module._forward_pre_hooks)

    def note_equal(self, entries: dict[str, Any], *keys: str) -> None:
        """Record entries that are compared by value: lists, which may change in place, numbers and texts."""
        for key in keys:
            self._compared.append(entries)
            self._compared_keys.append(key)
            self._equals.append(copy.copy(entries.get(key)))

    def note_addresses(self, tensors: Sequence[Tensor]) -> None:
        """Record the addresses of the tensors, and keep the tensors alive, since freed memory could be reused."""
        self._tensors += tensors
        self._addresses += map(Tensor.data_ptr, tensors)

    def note_contents(self, tensor: Tensor) -> None:
        """Record the address and the version of a tensor whose copy is used, and some of its elements: writes to
        ``.data`` do not change the version, unlike those of optimizers and ``load_state_dict``."""
        self.note_addresses([tensor])
        sample = _sample(tensor)
        self._samples.append(sample)
        self._sampled.append(sample.tobytes())
        if not tensor.is_inference():  # which has no version, and belongs to no parameter that is trained
            self._copied.append(tensor)
            self._versions.append(tensor._version)

    def holds(self) -> bool:
        """Return whether something was recorded and nothing has changed."""
        return (
            bool(self._values)
            and _C.entries_are(self._dicts, self._keys, self._values)
            and all(map(is_, map(type, self._modules), self._classes))
            and not any(self._hooks)
            and list(map(dict.get, self._compared, self._compared_keys)) == self._equals
            and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
            and [tensor._version for tensor in self._copied] == self._versions
            and list(map(np.ndarray.tobytes, self._samples)) == self._sampled
            and not _has_any_global_hook()
        )


def _sample(tensor: Tensor) -> np.ndarray:
    """Return a view of the bits of elements that are spread over a contiguous tensor. numpy has no bfloat16."""
    bits = tensor.detach().flatten().view(_BITS[tensor.element_size()])
    return bits[:: max(1, len(bits) // _SAMPLED)].numpy()
