# SPDX-License-Identifier: Apache-2.0
"""No result depends on torch's default dtype or default device: every public function is called under others."""

from __future__ import annotations

import contextlib
import math
import pickle
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from settings import ambient
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import lowbit
from lowbit.attention import masks, mods
from lowbit.attention.explain_mod import explain_mod
from lowbit.attention.kv_layer import QuantizedKVLayer
from lowbit.autotune import timing
from lowbit.autotune.plan_row import PlanRow
from lowbit.formats.spec import LinearSpec
from lowbit.reference import quantize as quantize_reference

OTHERS = ["float64", "bfloat16", "float16", "meta"]
CPU = torch.device("cpu")
INT4, INT8 = lowbit.int4_weight_only(32), lowbit.int8_weight_only()
HQQ, GPTQ = lowbit.int4_weight_only(32, algorithm=lowbit.HQQ()), lowbit.int4_weight_only(32, algorithm=lowbit.GPTQ())


@contextlib.contextmanager
def default(name: str) -> Iterator[None]:
    """With another default dtype, or with meta as the default device."""
    with ambient(f"default {'device' if name == 'meta' else 'dtype'} {name}"):
        yield


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(CPU).manual_seed(seed), dtype=torch.float32, device=CPU).to(dtype)


def integers(limit: int, *shape: int) -> Tensor:
    return torch.randint(limit, shape, generator=torch.Generator(CPU).manual_seed(0), device=CPU)


OPTIONS = {"dtype": torch.float32, "device": CPU}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 96, **OPTIONS), nn.Linear(64, 96, **OPTIONS)
        self.down_proj, self.act_fn = nn.Linear(96, 64, **OPTIONS), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp = nn.Embedding(40, 64, **OPTIONS), MLP()
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = random(*parameter.shape, seed=seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x if x.is_floating_point() else self.embed(x))


def quantized(config: object, **options: Any) -> nn.Module:
    model = Model()
    lowbit.quantize_(model, config, **options)
    return model


# ---- quantization --------------------------------------------------------------------------------------------------


def every_layer(module: nn.Module, name: str) -> bool:
    return isinstance(module, (nn.Linear, nn.Embedding))


def quantize(config: object) -> Callable[[Path], Any]:
    def run(path: Path) -> Any:
        model = quantized(config, filter_fn=None if config is GPTQ else every_layer,
                          calibration=lowbit.calibrate(Model(), [random(5, 64)], hessian=True) if config is GPTQ else None)  # fmt: skip
        results = model(random(5, 64)), model(integers(40, 3)), model.state_dict()
        lowbit.dequantize_(model)
        return *results, model.state_dict()

    return run


def calibrate(path: Path) -> Any:
    both = [lowbit.calibrate(Model(), [random(5, 64), random(7, 64, dtype=torch.bfloat16).float()], hessian=hessian) for hessian in (False, True)]
    both[1].save(path / "calibration.pt")
    both.append(lowbit.Calibration.load(path / "calibration.pt"))
    model = quantized(INT4, calibration=both[1])
    sums = {name: layer + layer for name, layer in both[2].layers.items()}
    moments = [(layer.squares, layer.products, layer.importance, layer.hessian) for layer in sums.values()]
    return [[(layer.squares, layer.products) for layer in one.layers.values()] for one in both], moments, model.state_dict()


def save_and_load(path: Path) -> Any:
    model, results = quantized(INT4, filter_fn=every_layer), []
    for layout in lowbit._C.LAYOUTS:
        torch.save(lowbit.quant.repack(model.state_dict(), layout), path / "model.pt")
        fresh = Model()
        lowbit.load(fresh, path / "model.pt")
        results += [fresh.state_dict(), fresh(random(5, 64))]
    return results, pickle.loads(pickle.dumps(model))(random(2, 64))


def layers(path: Path) -> Any:
    linear, spec = Model().mlp.up_proj, LinearSpec("int4", 32, True, mapping="asymmetric")
    layer = lowbit.QuantLinear.from_linear(linear, spec)
    codes, scale, zero = layer.unpack()
    again = lowbit.QuantLinear.pack(codes, scale, zero, spec, layer.bias)
    empty = lowbit.QuantLinear(64, 96, spec=spec, device=CPU, dtype=torch.float32)
    empty.load_state_dict(again.state_dict())
    x = random(3, 64)
    table = lowbit.QuantEmbedding(40, 64, spec=LinearSpec("int8"), device=CPU, dtype=torch.float32)
    table.load_state_dict(quantized(INT8, filter_fn=every_layer).embed.state_dict())
    values = layer.dequantize(), layer.to_linear()(x), empty(x), table(integers(40, 3)), table.dequantize()
    return codes, scale, zero, again.state_dict(), values


def gradients(path: Path) -> Any:
    x = random(5, 64).requires_grad_()
    y = quantized(lowbit.int8_dynamic_activation_int4_weight())(x)
    y.square().sum().backward()
    layer = quantized(INT8).mlp.up_proj
    return y, x.grad, lowbit.linear(random(3, 64), layer.weight, layer.stored, layer.bias, activation="silu")


def gated_mlps(path: Path) -> Any:
    model = quantized(INT8)
    assert list(lowbit.fuse_gated_mlps(model)) == ["mlp"]
    return model(random(5, 64)), lowbit.dequantize_(model), model.state_dict()


# ---- optimizers ----------------------------------------------------------------------------------------------------


def optimize(name: str) -> Callable[[Path], Any]:
    def run(path: Path) -> Any:
        cls = getattr(lowbit.optim, name)
        options = {"momentum": 0.9} if name.startswith("SGD") else {}
        params = [nn.Parameter(random(70, 70, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
        optimizer = cls(params, lr=torch.tensor(1e-2, dtype=torch.float32, device=CPU) if name == "AdamW8bit" else 1e-2, **options)
        for step in range(2):
            for parameter in params:
                parameter.grad = random(*parameter.shape, dtype=parameter.dtype, seed=step)
            optimizer.step()
        torch.save(optimizer.state_dict(), path / "optimizer.pt")
        copies = [nn.Parameter(parameter.detach().clone()) for parameter in params]
        other = cls(copies, lr=1e-2, **options)
        other.load_state_dict(torch.load(path / "optimizer.pt", weights_only=True))
        for parameter in copies:
            parameter.grad = random(*parameter.shape, dtype=parameter.dtype, seed=9)
        other.step()
        return params, copies, optimizer.state_dict(), other.state_dict()

    return run


def load_state_of_torch(path: Path) -> Any:
    """The state of torch's own AdamW, whose moments are encoded."""
    params = [nn.Parameter(random(70, 70))]
    theirs = torch.optim.AdamW(params, lr=1e-2)
    params[0].grad = random(70, 70)
    theirs.step()
    results = []
    for name in ("AdamW", "AdamW8bit", "AdamW4bit", "AdamWFp8"):
        ours = getattr(lowbit.optim, name)(params, lr=1e-2)
        ours.load_state_dict(theirs.state_dict())
        results.append(ours.state_dict())
    return results


# ---- attention -----------------------------------------------------------------------------------------------------


def heads(seed: int, *, dtype: torch.dtype = torch.float32, gradient: bool = False, kv: int = 4) -> Tensor:
    return random(2, kv, 40, 32, dtype=dtype, seed=seed).requires_grad_(gradient)


def attend(path: Path) -> Any:
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        mask = integers(2, 40, 40).bool() | torch.eye(40, dtype=torch.bool, device=CPU)
        for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": random(40, 40, dtype=dtype)}, {"scale": 0.5}):
            q, k, v = (heads(seed, dtype=dtype, gradient=True) for seed in range(3))
            out = lowbit.scaled_dot_product_attention(q, k, v, **options)
            results += [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]
    torch.manual_seed(0)
    dropped = lowbit.scaled_dot_product_attention(heads(0), heads(1), heads(2), dropout_p=0.5)
    with_sink = lowbit.scaled_dot_product_attention(heads(0), heads(1, kv=2), heads(2, kv=2), enable_gqa=True)
    return results, dropped, with_sink


def score_mods() -> dict[str, Callable[..., Tensor]]:
    bias, table = random(4, 40, 40), random(8, 4)
    return {
        "alibi": mods.alibi(4),
        "alibi of 3": lambda s, b, h, q, k: mods.alibi(3)(s, b, h // 2, q, k),
        "softcap": mods.softcap(20.0),
        "learned_bias": mods.learned_bias(bias),
        "t5_bias": mods.t5_bias(table, max_distance=32),
        "own": lambda s, b, h, q, k: s * 0.5 + torch.where(q >= k, bias[h, q, k], -math.inf),
        "numbers": lambda s, b, h, q, k: torch.tanh(s / 3) * 2.5 + (q - k) // 7,
    }


def flex(name: str) -> Callable[[Path], Any]:
    def run(path: Path) -> Any:
        results = []
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            q, k, v = (heads(seed, dtype=dtype, gradient=True) for seed in range(3))
            out, aux = lowbit.flex_attention(
                q, k, v, score_mods()[name], return_aux=lowbit.AuxRequest(lse=True, max_scores=True)
            )
            results += [out, aux.lse, aux.max_scores, *torch.autograd.grad(out.square().sum(), (q, k, v))]
        return results

    return run


def mask_mods() -> dict[str, Callable[..., Tensor]]:
    starts = torch.tensor([0, 13, 40], device=CPU)
    return {
        "causal": masks.causal,
        "block_diffusion": masks.block_diffusion(20, 5),
        "dilated": masks.dilated(16, 2),
        "document": masks.document(masks.document_ids(starts)),
        "document_causal": masks.document(masks.document_ids(starts), masks.causal),
        "global_window": masks.global_window(8, torch.arange(40, device=CPU) % 9 == 0),
        "natten": masks.natten(5, 8, 3),
        "prefix_lm": masks.prefix_lm(7),
        "prefix_lm_of_batch": masks.prefix_lm(torch.tensor([7, 9], device=CPU)),
        "sliding_window": masks.causal & ~masks.sliding_window(8) | masks.sliding_window(3),
        "joined": lowbit.and_masks(lowbit.or_masks(masks.causal, masks.sliding_window(3)), lowbit.noop_mask),
    }


def block_mask(name: str) -> Callable[[Path], Any]:
    def run(path: Path) -> Any:
        mod = mask_mods()[name]
        mask = lowbit.create_block_mask(mod, 2, None, 40, 40, device="cpu", BLOCK_SIZE=16)
        out = lowbit.flex_attention(heads(0), heads(1), heads(2), block_mask=mask, sink=random(4))
        blocks = mask.kv_num_blocks, mask.kv_indices, mask.q_num_blocks, mask.to_dense()
        return blocks, lowbit.create_mask(mod, 2, 4, 40, 40, device="cpu"), out

    return run


def flex_options(path: Path) -> Any:
    q, k, v = (heads(seed)[:1] for seed in range(3))
    documents = lowbit.flex_attention(q, k, v, cu_seqlens=torch.tensor([0, 13, 40], device=CPU))
    torch.manual_seed(0)
    dropped = lowbit.flex_attention(q, k, v, mods.softcap(5.0), dropout_p=0.25)
    explained = explain_mod(mods.alibi(4))
    through_torch = lowbit.flex_attention(q, k, v, lambda s, b, h, i, j: torch.special.bessel_j0(s))
    return documents, dropped, str(explained), explained.source("cuda"), through_torch


def kv_cache(format: str) -> Callable[[Path], Any]:
    def run(path: Path) -> Any:
        cache, results = lowbit.QuantizedKVCache(format), []
        for length in (9, 1, 1):
            key, value = (random(2, 2, length, 32, seed=seed) for seed in range(2))
            cache.append(0, key, value)
            results.append(cache.attend(0, random(2, 4, length, 32, seed=2), sink=random(4)))
        results.append(cache.attend(0, random(2, 4, 1, 32), mask=integers(2, 2, 1, 1, 11).bool(), causal=False))
        cache.reorder(torch.tensor([1, 0, 1], device=CPU))
        cache.crop(8)
        layer = cache.layer(0)
        assert isinstance(layer, QuantizedKVLayer)
        return results, layer.keys(), layer.values(torch.bfloat16), cache.attend(0, random(3, 4, 1, 32, dtype=torch.bfloat16))

    return run


# ---- autoquant -----------------------------------------------------------------------------------------------------


def autoquant(path: Path) -> Any:
    """Times are not compared; the layers' inputs, and the plan's result, are."""
    plan = lowbit.autoquant(Model(), random(5, 64), candidates=[INT8], min_sqnr=10.0, cache=path / "times.json")
    saw = [(row.layer, row.shape, row.calls) for row in plan.rows]
    made = lowbit.Plan([PlanRow(*row, INT8.spec(torch.float32), "", 1.0, 1.0, 30.0, 1, 1) for row in saw], 20.0)
    made.save(path / "plan.json")
    model = Model()
    lowbit.Plan.load(path / "plan.json").apply(model)
    return saw, model(random(5, 64)), model.state_dict()


CALLS: dict[str, Callable[[Path], Any]] = {
    **{f"quantize_ {config}": quantize(config) for config in (
        INT8, INT4, HQQ, GPTQ, lowbit.int8_weight_only(32), lowbit.int4_weight_only(32, mapping_type=lowbit.MappingType.ASYMMETRIC),
        lowbit.intx_weight_only(torch.int3, 32), lowbit.nf4_weight_only(), lowbit.fp4_weight_only(), lowbit.float8_weight_only(),
        lowbit.float8_dynamic_activation_float8_weight(), lowbit.int8_dynamic_activation_int8_weight(), lowbit.float_weight(torch.bfloat16),
    )},
    "calibrate": calibrate, "save and load": save_and_load, "layers": layers, "gradients": gradients, "gated MLPs": gated_mlps,
    **{f"optim.{name}": optimize(name) for name in lowbit.optim.__all__ if name not in ("ChainedOptimizer", "split_for_muon")}, "state of torch's AdamW": load_state_of_torch,
    "scaled_dot_product_attention": attend, **{f"flex_attention {name}": flex(name) for name in score_mods()},
    **{f"block mask {name}": block_mask(name) for name in mask_mods()}, "flex options": flex_options,
    **{f"cache {format}": kv_cache(format) for format in ("int8", "int4")},
    "autoquant": autoquant,
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_another_default_changes_nothing(call, tmp_path, monkeypatch, subtests):
    monkeypatch.setattr(timing, "BUDGET_S", 0.0)
    wanted, shape = pytree.tree_flatten(CALLS[call](tmp_path))
    assert wanted
    for name in OTHERS:
        with subtests.test(name):
            with default(name):
                got, same_shape = pytree.tree_flatten(CALLS[call](tmp_path))
            assert shape == same_shape
            for one, other in zip(got, wanted, strict=True):
                if isinstance(other, Tensor):
                    assert (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape), name
                    assert torch.equal(one, other) or bool(one.isnan().all()), f"{call} under {name}"
                else:
                    assert one == other, f"{call} under {name}"


@pytest.mark.parametrize("name", OTHERS)
def test_tables_of_a_module_that_is_imported_under_another_default_are_the_same(name):
    with default(name):
        again = runpy.run_path(quantize_reference.__file__)["LEVELS"]
    assert again.keys() == quantize_reference.LEVELS.keys()
    for format, levels in quantize_reference.LEVELS.items():
        assert again[format].dtype == torch.float32 and torch.equal(again[format].nan_to_num(), levels.nan_to_num()), format
