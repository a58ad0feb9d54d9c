# SPDX-License-Identifier: Apache-2.0
# A row whose scores are all finfo.min (or any large finite number) is averaged.
import torch
from tests.fuzz import check

torch.manual_seed(0)
for first_row in (torch.finfo(torch.float32).min, -1e30, -1e12, 1e30):

    def make_score_mod(t0, first_row=first_row):
        def score_mod(s, b, h, i, j):
            return torch.where(i >= 1, s, first_row) + 0 * t0

        return score_mod

    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    check.flex(q, k, v, make_score_mod, [torch.zeros(())])
