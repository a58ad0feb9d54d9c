# SPDX-License-Identifier: Apache-2.0
"""Names under `lowbit.devices`, as messages and pages write them: there after `import lowbit`, and loaded at first use."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("name", ["simulated", "level_zero"])
def test_a_device_of_ours_is_loaded_at_first_use(python: Callable[..., str], name: str) -> None:
    out = python(
        f"""import sys, lowbit
print("lowbit.devices.{name}" in sys.modules)
print(callable(lowbit.devices.{name}.enable), lowbit.devices.{name}.enabled())"""
    )
    assert out.split() == ["False", "True", "False"]
