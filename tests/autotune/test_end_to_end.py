# SPDX-License-Identifier: Apache-2.0
"""autoquant on the clock of this machine: only what must be true however the times come out."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import lowbit
from lowbit import _C
from lowbit.quant import QuantLinear


class Encoder(nn.Module):
    """Residual MLPs over LayerNorms, wide enough that quantizing pays."""

    def __init__(self, blocks: int = 3, width: int = 192) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(blocks))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(nn.functional.gelu(up(norm(x))))
        return x


def sqnr_in_float64(wanted: torch.Tensor, got: torch.Tensor) -> float:
    noise = (wanted.double() - got.double()).square().sum().item()
    return 10 * math.log10(wanted.double().square().sum().item() / noise) if noise else math.inf


@pytest.mark.parametrize("min_sqnr", [10.0, 20.0, 35.0, 60.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_applied_plan_holds_its_bound_everywhere(min_sqnr, dtype):
    torch.manual_seed(0)
    model = Encoder().to(dtype).eval()
    x = torch.randn(2, 16, 192, dtype=dtype)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        wanted = model(x)
    plan = lowbit.autoquant(changed, x, min_sqnr=min_sqnr, cache=False)
    assert not any(isinstance(module, QuantLinear) for module in changed.modules())
    inputs: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, args, name=name: inputs.__setitem__(name, args[0]))
    with torch.no_grad():
        model(x)
        plan.apply(changed)
        got = changed(x)
    quantized = {name: module for name, module in changed.named_modules() if isinstance(module, QuantLinear)}
    assert {name: module.spec for name, module in quantized.items()} == plan.specs
    assert len(plan.rows) == 6 and not plan.seconds > plan.float_seconds
    assert sqnr_in_float64(wanted, got) >= min_sqnr - 0.01
    # inf is inf: dense float32 rows add in the order of torch's BLAS where k is short, here in the ups, and equal it
    assert sqnr_in_float64(wanted, got) == pytest.approx(plan.model_db, abs=0.01)
    for row in plan.rows:
        if row.spec is None:
            continue
        assert row.seconds < row.float_seconds and row.bytes_after == quantized[row.layer].weight.nbytes
        float_layer, seen = model.get_submodule(row.layer), inputs[row.layer].double()
        exact = seen @ float_layer.weight.double().T + float_layer.bias.double()
        with torch.no_grad():
            assert sqnr_in_float64(exact, quantized[row.layer](inputs[row.layer])) >= min_sqnr - 0.5, row
        assert row.error_db >= min_sqnr
        if row.row:
            quantized[row.layer](inputs[row.layer])
            assert _C.last_kernel("linear") == row.row


def test_generate_is_recorded_with_prompt_and_steps(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    recording = lowbit.autoquant(model, manual=True, candidates=[lowbit.int8_weight_only()], cache=False)
    recording.generate(torch.arange(7)[None], max_new_tokens=5, do_sample=False)
    plan = recording.finalize(example_input={"input_ids": torch.arange(7)[None]})
    rows = {row.layer: row for row in plan.rows}
    assert rows["model.layers.1.mlp.down_proj"].calls == ((1, "float32", 4), (7, "float32", 1))
    assert plan.kv_cache.format in ("int8", "int4") and plan.kv_cache.error_db["int8"] > 30 > plan.kv_cache.error_db["int4"]
    assert plan.kv_cache.bytes["int8"] < plan.kv_cache.bytes["float"] and 'QuantizedCache("' in repr(plan)
    plan.apply(model)
    assert model.generate(torch.arange(7)[None], max_new_tokens=3, do_sample=False).shape == (1, 10)


def test_a_model_that_writes_its_own_text_gets_codes_by_gptq(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = {"input_ids": torch.arange(40)[None]}
    one = lowbit.int8_dynamic_activation_int4_weight(32)
    plan = lowbit.autoquant(model, ids, candidates=[one], min_sqnr=None, calibration="self", cache=False)
    assert any(note.startswith("calibrated on 16 x 63 tokens that the model wrote by itself") for note in plan.notes)
    by_gptq = {name for name, spec in plan.specs.items() if spec.algorithm == lowbit.GPTQ()}
    assert {spec.format for name, spec in plan.specs.items() if name not in by_gptq} <= {"int8"}, "the head"
    plan.save(tmp_path / "plan.json")
    wanted, got = copy.deepcopy(model), copy.deepcopy(model)
    plan.apply(wanted)
    lowbit.Plan.load(tmp_path / "plan.json").apply(got, calibration="self")
    for (name, value), other in zip(wanted.state_dict().items(), got.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
    if plan.specs:
        model.save_pretrained(tmp_path / "float")
        with pytest.raises(ValueError, match="plan.json was made with a calibration and needs calibration, got None"):
            lowbit.quantize_checkpoint(tmp_path / "float", tmp_path / "packed", plan=tmp_path / "plan.json")
        lowbit.quantize_checkpoint(
            tmp_path / "float", tmp_path / "packed", plan=tmp_path / "plan.json", calibration="self"
        )
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
        assert torch.equal(loaded(**ids).logits, wanted(**ids).logits)


def test_the_kv_cache_is_the_smallest_that_holds_the_bound():
    from lowbit.autotune.kv_choice import choose_cache

    class Cache:
        layers = [type("Layer", (), {"keys": torch.randn(1, 2, 40, 64), "values": torch.randn(1, 2, 40, 64)})]

    torch.manual_seed(0)
    assert [choose_cache(Cache, bound).format for bound in (15.0, 30.0, 60.0)] == ["int4", "int8", "float"]
    assert choose_cache(None, 20.0) is None and choose_cache(type("Empty", (), {"layers": []}), 20.0) is None
