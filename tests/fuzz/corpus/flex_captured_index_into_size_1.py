# SPDX-License-Identifier: Apache-2.0
# A captured 0-d index into a dimension of size 1: IndexError.
import torch
from tests.fuzz import check

torch.manual_seed(0)
q = torch.randn(1, 1, 16, 8)
k, v = (torch.randn(1, 1, 16, 8) for _ in range(2))
captured = [torch.randn(1, 16), torch.tensor(0)]


def make_score_mod(t0, t1):
    def score_mod(s, b, h, i, j):
        return s + t0[t1][j]

    return score_mod


check.flex(q, k, v, make_score_mod, captured)
