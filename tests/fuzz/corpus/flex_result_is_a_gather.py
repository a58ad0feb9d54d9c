# SPDX-License-Identifier: Apache-2.0
# A score program whose result is a gather: the raw scores were taken, or memory beside the tile.
import torch
from tests.fuzz import check

torch.manual_seed(0)
q = torch.randn(1, 2, 128, 8)
k, v = (torch.randn(1, 2, 128, 8) for _ in range(2))
captured = [torch.randn(128, 128)]


def make_score_mod(t0):
    def score_mod(s, b, h, i, j):
        return t0[i, j]

    return score_mod


check.flex(q, k, v, make_score_mod, captured)
q = torch.randn(1, 2, 24, 8)
k, v = (torch.randn(1, 2, 136, 8) for _ in range(2))
captured = [torch.randn(24, 136)]


def make_score_mod(t0):
    def score_mod(s, b, h, i, j):
        return t0[23 - i, j]

    return score_mod


check.flex(q, k, v, make_score_mod, captured)
