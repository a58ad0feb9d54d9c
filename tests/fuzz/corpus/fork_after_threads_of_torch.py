# SPDX-License-Identifier: Apache-2.0
# A child forked after torch used its threads but before lowbit did hung.
import torch
from tests.fuzz import check

torch.manual_seed(0)
x = torch.randn(600, 600)
for _ in range(3):
    x = (x @ x).tanh()
q, k, v = (torch.randn(2, 8, 200, 16) for _ in range(3))
check.flex_now(q, k, v, score_mod=lambda s, b, h, i, j: s + h, where=check.in_child)
