# SPDX-License-Identifier: Apache-2.0
# An append or crop that fails changes nothing.
import torch
from tests.fuzz import check

torch.manual_seed(0)
check.cache(
    "int8",
    [
        ("append", 0, torch.randn(1, 1, 4, 600), torch.randn(1, 1, 4, 32)),
        ("append", 0, torch.randn(1, 1, 4, 32), torch.randn(1, 1, 4, 32)),
    ],
)
check.cache(
    "int8",
    [
        ("append", 0, torch.randn(1, 1, 9, 32), torch.randn(1, 1, 9, 32)),
        ("append", 1, torch.randn(1, 1, 4, 32), torch.randn(1, 1, 4, 32)),
        ("crop", 6),
    ],
)
