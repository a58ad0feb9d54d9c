# SPDX-License-Identifier: Apache-2.0
"""An op has the same refusals with data and without, as torch.compile and torch.export call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

ANY = (TypeError, ValueError, RuntimeError, NotImplementedError)


def refused_alike(op: Callable[..., Any], call: dict[str, Any], error: Any = ANY, text: str = "") -> None:
    """The op and its fake kernel raise the same error."""
    with pytest.raises(error, match=text) as real:
        op(**call)
    with FakeTensorMode() as mode:
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, call)
        with pytest.raises(type(real.value)) as fake:
            op(**fakes)
    assert str(fake.value) == str(real.value)
