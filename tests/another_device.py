# SPDX-License-Identifier: Apache-2.0
"""The common part of the tests of a device: tensors, views, files and training there beside the CPU; a small model."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import lowbit

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
CONFIGS = (lowbit.int8_weight_only(), lowbit.int4_weight_only(group_size=32), lowbit.int8_dynamic_activation_int8_weight())


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 40))


def check_against_the_cpu(function: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]], device: str) -> None:
    """Its result there is that of the CPU, and so are its gradients."""
    here = [torch.randn(shape, requires_grad=True) for shape in shapes]
    there = [tensor.detach().to(device).requires_grad_() for tensor in here]
    mine, theirs = function(*here), function(*there)
    torch.testing.assert_close(theirs.cpu(), mine)
    mine.sum().backward()
    theirs.sum().backward()
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(b.grad.cpu(), a.grad)


def check_values(dtype: torch.dtype, device: str) -> None:
    """They survive the way there and back, with their strides."""
    here = (torch.randn(4, 6) * 4).to(dtype)
    there = here.to(device)
    assert there.device == torch.device(device) and there.dtype == dtype and there.stride() == here.stride()
    first = there.to(device.partition(":")[0] + ":0").clone()
    assert torch.equal(first.cpu().view(torch.uint8), here.view(torch.uint8))


def check_views(device: str) -> None:
    """They share memory, and writes through them are seen; results are resized."""
    x = torch.zeros(4, 6, device=device)
    for view in (x[1], x.t()[:, 2], x.view(24)[12:15], x.unfold(1, 2, 2)[3], x.as_strided((2,), (12,), 5)):
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        view.add_(1)
    assert x.sum().item() == 6 + 6 + 3 + 6 + 2
    x.T.copy_(torch.arange(24.0).view(6, 4))
    assert x.cpu()[1].tolist() == [1, 5, 9, 13, 17, 21]
    out = torch.empty(0, device=device)
    assert torch.add(x, 1, out=out) is out and torch.equal(out, x + 1)


def check_training(device: str) -> None:
    """Three steps are those of the CPU."""
    torch.manual_seed(0)
    here = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2))
    there = copy.deepcopy(here).to(device)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (here, there)]
    for _ in range(3):
        x = torch.randn(5, 8)
        for network, optimizer, place in zip((here, there), optimizers, ("cpu", device), strict=True):
            network(x.to(place)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(here.parameters(), there.parameters(), strict=True):
        assert theirs.device == torch.device(device)
        torch.testing.assert_close(theirs.cpu(), mine)


def check_files_and_copies(device: str) -> None:
    """A tensor is loaded where it was or where it is wanted, shares what it shared, and a copy is its own."""
    x = torch.randn(6, device=device)
    file = io.BytesIO()
    torch.save({"x": x, "part": x[2:4]}, file)

    def loaded(**options: object) -> dict[str, Tensor]:
        file.seek(0)
        return torch.load(file, **options)

    there = loaded()
    assert there["x"].device == torch.device(device) and torch.equal(there["x"], x)
    assert there["part"].untyped_storage().data_ptr() == there["x"].untyped_storage().data_ptr()
    assert torch.equal(loaded(map_location="cpu")["part"], x.cpu()[2:4])
    first = device.partition(":")[0] + ":0"
    assert loaded(map_location=first)["x"].device == torch.device(first)
    copied = copy.deepcopy(x)
    assert copied.device == x.device and torch.equal(copied, x) and copied.data_ptr() != x.data_ptr()
