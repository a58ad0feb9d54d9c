# SPDX-License-Identifier: Apache-2.0
# floor_divide(-x, inf) is -1.
import torch
from tests.fuzz import check

torch.manual_seed(0)
q = torch.randn(1, 2, 16, 8)
k, v = (torch.randn(1, 2, 16, 8) for _ in range(2))
captured = [-torch.ones(16)]


def make_score_mod(t0):
    def score_mod(s, b, h, i, j):
        return s + torch.floor_divide(t0[i], torch.tensor(float("inf")))

    return score_mod


check.flex(q, k, v, make_score_mod, captured)
