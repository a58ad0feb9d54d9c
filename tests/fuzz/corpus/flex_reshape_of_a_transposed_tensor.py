# SPDX-License-Identifier: Apache-2.0
# A reshape of a captured tensor that is not contiguous was refused.
import torch
from tests.fuzz import check

torch.manual_seed(0)
q = torch.randn(1, 2, 16, 8)
k, v = (torch.randn(1, 2, 16, 8) for _ in range(2))
captured = [torch.randn(16, 16).t()]


def make_score_mod(t0):
    def score_mod(s, b, h, i, j):
        return s + t0.reshape(-1)[i * 16 + j]

    return score_mod


check.flex(q, k, v, make_score_mod, captured)
