# SPDX-License-Identifier: Apache-2.0
"""An unchanged program of bitsandbytes on our kernels: what is taken, what stays, and that they agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("bitsandbytes")

from lowbit.peers.bitsandbytes_ops import OPS  # noqa: E402

STATES = "\nimport lowbit\nprint(lowbit.info()['bitsandbytes'])"


@pytest.mark.parametrize("order", ["import lowbit, bitsandbytes", "import bitsandbytes, lowbit"])
def test_importing_bitsandbytes_takes_its_ops_and_warns_of_nothing(joined, order):
    out = joined("import warnings\nwarnings.simplefilter('error')\n" + order + STATES)
    for op in OPS:
        assert f"{op.__name__}: ours" in out
    assert out.count("ours") == len(OPS)


def test_the_switch_leaves_bitsandbytes_as_it_is(with_bitsandbytes):
    assert "left as it is, LOWBIT_BITSANDBYTES=0" in with_bitsandbytes("import bitsandbytes" + STATES, LOWBIT_BITSANDBYTES="0")


def test_a_failure_breaks_no_import_and_is_told(joined):
    code = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "lowbit.peers.bitsandbytes_optim":
            raise ImportError("broken (test)")
sys.meta_path.insert(0, Broken())
import bitsandbytes
"""
    assert "left as it is: ImportError: broken (test)" in joined(code + STATES)


def test_an_op_with_other_arguments_is_left(joined):
    """As of another version of bitsandbytes."""
    code = """
import lowbit.peers.bitsandbytes_optim as optim
update = optim.optimizer_update_32bit
def optimizer_update_32bit(theirs, name, g): ...
optim.optimizer_update_32bit = optimizer_update_32bit
import bitsandbytes
"""
    out = joined(code + STATES)
    assert "optimizer_update_32bit: left to bitsandbytes, whose op takes optimizer_name, g, p" in out
    assert "optimizer_update_8bit_blockwise: ours" in out


TRAIN = """
import sys, torch, bitsandbytes as bnb
def run(name, dtype, bits):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(96, 128, dtype=torch.float64).to(dtype))]
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(bnb.optim, name)(params, lr=1e-2, weight_decay=1e-2, optim_bits=bits, **options)
    for step in range(10):
        torch.manual_seed(step)
        params[0].grad = torch.randn(96, 128).to(dtype)
        optimizer.step()
    return params[0].data, dict(optimizer.state[params[0]])
results = {}
for name in ("AdamW", "SGD", "Lion", "RMSprop", "LAMB", "AdEMAMix"):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for bits in (8, 32):
            results[name, dtype, bits] = run(name, dtype, bits)
torch.save(results, sys.argv[1])
"""


def test_steps_and_states_are_those_of_bitsandbytes(with_bitsandbytes, tmp_path):
    results = []
    for switch in ("1", "0"):
        with_bitsandbytes(TRAIN, str(tmp_path / f"{switch}.pt"), LOWBIT_BITSANDBYTES=switch)
        results.append(torch.load(tmp_path / f"{switch}.pt"))
    for case, (theirs, their_state) in results[1].items():
        name, dtype, bits = case
        ours, our_state = results[0][case]
        bound = 1e-6 if bits == 32 and dtype == torch.float32 else 5e-3
        assert (ours.double() - theirs.double()).norm() <= bound * theirs.double().norm(), case
        assert our_state.keys() == their_state.keys()
        if bits == 32:
            torch.testing.assert_close(our_state["state1"], their_state["state1"], rtol=1e-2, atol=1e-2)


def test_a_parameter_without_gradients_stays_where_it_is(with_bitsandbytes):
    """bitsandbytes' own kernel reads an exact 0 back as 2e-5 of its block and lets such parameters drift."""
    code = """
import torch, bitsandbytes as bnb
p = torch.nn.Parameter(torch.ones(64, 64))
optimizer = bnb.optim.AdamW8bit([p], lr=1e-2, weight_decay=0)
for step in range(30):
    p.grad = torch.randn(64, 64)
    p.grad[:, ::2] = 0
    optimizer.step()
print((p[:, ::2] - 1).abs().max().item(), (p[:, 1::2] - 1).abs().max().item() > 0.01)
"""
    assert with_bitsandbytes(code).split() == ["0.0", "True"]


def test_no_update_is_longer_than_ten_learning_rates_and_the_loss_is_theirs(with_bitsandbytes):
    """Where a second moment rounds to 0 beside a first moment that does not, the next update is 1e5 learning rates."""
    code = f"""
import sys; sys.path[:0] = [{str(Path(__file__).parents[1])!r}, {str(Path(__file__).parents[1] / "optim")!r}]
from small_training import train
import bitsandbytes as bnb
print(*train(lambda params, lr: bnb.optim.AdamW8bit(params, lr=lr)))
"""
    (largest, loss), (_, theirs) = (map(float, with_bitsandbytes(code, LOWBIT_BITSANDBYTES=switch).split()) for switch in "10")
    assert largest <= 10 and loss == pytest.approx(theirs, rel=0.02)


def test_codes_are_the_nearest_and_other_maps_are_theirs(with_bitsandbytes):
    code = """
import torch, bitsandbytes.functional as F
x = torch.randn(5, 1000)
for signed, values in ((True, x), (False, x.abs())):
    map = F.create_dynamic_map(signed)
    for blocksize in (64, 256, 4096):
        codes, state = F.quantize_blockwise(values, code=map, blocksize=blocksize)
        assert torch.allclose(F.dequantize_blockwise(codes, state), map[codes.int()] * state.absmax.repeat_interleave(blocksize)[: 5000].view(5, 1000), rtol=1e-6)
        relative = values.flatten() / state.absmax.repeat_interleave(blocksize)[: 5000]
        best = (relative[:, None] - map).abs().argmin(1)
        assert (codes.flatten() != best).sum() < 5, (signed, blocksize, (codes.flatten() != best).sum())
linear = F.create_linear_map()
codes, state = F.quantize_blockwise(x, code=linear)
assert (F.dequantize_blockwise(codes, state) - x).abs().max() < 0.03
negative, state = F.quantize_blockwise(x, code=F.create_dynamic_map(False))
assert (F.dequantize_blockwise(negative, state) >= 0).all()
print("agree")
"""
    assert with_bitsandbytes(code).strip() == "agree"
