# SPDX-License-Identifier: Apache-2.0
# A row whose scores are all finfo.min (or any large finite number) is averaged.
import torch
from tests.fuzz import check

torch.manual_seed(0)
q = torch.randn(1, 2, 16, 8)
k, v = (torch.randn(1, 2, 16, 8) for _ in range(2))
captured = [torch.zeros(())]


def make_score_mod(t0):
    def score_mod(s, b, h, i, j):
        return torch.where(i >= 1, s, torch.finfo(torch.float32).min) + 0 * t0

    return score_mod


check.flex(q, k, v, make_score_mod, captured)
q = torch.randn(1, 2, 16, 8)
k, v = (torch.randn(1, 2, 16, 8) for _ in range(2))
captured = [torch.zeros(())]


def make_score_mod(t0):
    def score_mod(s, b, h, i, j):
        return torch.where(i >= 1, s, -1e30) + 0 * t0

    return score_mod


check.flex(q, k, v, make_score_mod, captured)
q = torch.randn(1, 2, 16, 8)
k, v = (torch.randn(1, 2, 16, 8) for _ in range(2))
captured = [torch.zeros(())]


def make_score_mod(t0):
    def score_mod(s, b, h, i, j):
        return torch.where(i >= 1, s, -1e12) + 0 * t0

    return score_mod


check.flex(q, k, v, make_score_mod, captured)
q = torch.randn(1, 2, 16, 8)
k, v = (torch.randn(1, 2, 16, 8) for _ in range(2))
captured = [torch.zeros(())]


def make_score_mod(t0):
    def score_mod(s, b, h, i, j):
        return torch.where(i >= 1, s, 1e30) + 0 * t0

    return score_mod


check.flex(q, k, v, make_score_mod, captured)
