# SPDX-License-Identifier: Apache-2.0
# relu(nan) is nan.
import torch
from tests.fuzz import check

torch.manual_seed(0)
q = torch.randn(1, 2, 16, 8)
k, v = (torch.randn(1, 2, 16, 8) for _ in range(2))
captured = [torch.tensor([0.0, 1.0, float("nan"), -1.0] * 4)]


def make_score_mod(t0):
    def score_mod(s, b, h, i, j):
        return s + torch.relu(t0[i])

    return score_mod


check.flex(q, k, v, make_score_mod, captured)
