# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs: compile their kernels ahead of time, without a GPU. docs/ops/cuda.md lists the ops that run on them."""

from __future__ import annotations

from lowbit import _C


def prebuild(*architectures: str) -> dict[str, str]:
    """Compile the CUDA kernels that optimizers and linear layers use most into the cache on disk. This requires NVRTC,
    but no GPU.

    Args:
        architectures: NVRTC's names, such as ``"sm_80"``, ``"sm_90a"``.

    Returns:
        A description of each kernel source, with its file.

    Raises:
        RuntimeError: NVRTC was not found, or does not know the architecture.

    Example:
        >>> lowbit.devices.prebuild("sm_90a")
    """
    return {row["path"]: row["name"] for name in architectures for row in _C.cuda.prebuild(name.strip())}
