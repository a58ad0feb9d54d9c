# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers on tensors of torch's own xpu, whose memory the host cannot read, on zsim."""

from __future__ import annotations

from collections.abc import Callable


def test_steps_have_the_bits_of_the_cpu(xpu_program: Callable[..., str]) -> None:
    printed = xpu_program("xpu_steps.cpp").splitlines()
    assert printed == ["3 steps", "3 steps", "optim_step_dynamic8_level_zero_xpu 1"]
