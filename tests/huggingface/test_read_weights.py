# SPDX-License-Identifier: Apache-2.0
"""Models of transformers that read the weight of a linear layer themselves: that layer stays float by name, and the
model computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weights_read_in_source import read_in_models

import lowbit
from lowbit.quant.read_weights import DTYPE_READ_BY, READ_BY, weights_that_are_read

transformers = pytest.importorskip("transformers")

IDS = torch.arange(2, 12)[None]
SMALL = dict(vocab_size=97, hidden_size=64, num_hidden_layers=2)
T5 = dict(vocab_size=97, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0)
SPEECH = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, conv_dim=(32, 32), conv_stride=(5, 2),
    conv_kernel=(10, 3), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
)  # fmt: skip
NLLB = dict(
    vocab_size=97, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=96, decoder_ffn_dim=96, num_experts=2,
)  # fmt: skip
SWIN = dict(image_size=32, patch_size=4, embed_dim=32, depths=[1, 1], num_heads=[2, 4], window_size=4)
BERT = dict(SMALL, num_attention_heads=4, intermediate_size=96, embedding_size=32, intra_bottleneck_size=32, true_hidden_size=32)
MODELS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "T5": ("ForConditionalGeneration", T5, {"wo"}),
    "UMT5": ("ForConditionalGeneration", T5, {"wo"}),
    "Mamba": ("ForCausalLM", SMALL | {"state_size": 8}, {"dt_proj"}),
    "FalconMamba": ("ForCausalLM", SMALL | {"state_size": 8}, {"dt_proj"}),
    "Mamba2": ("ForCausalLM", SMALL | dict(state_size=8, num_heads=8, head_dim=16, n_groups=1), set()),
    "Rwkv": ("ForCausalLM", SMALL | dict(attention_hidden_size=64, intermediate_size=96), {"output", "value"}),
    "WavLM": ("Model", SPEECH, {"q_proj", "k_proj", "v_proj", "out_proj"}),
    "MobileBert": ("ForMaskedLM", BERT, {"dense", "decoder"}),
    "NllbMoe": ("ForConditionalGeneration", NLLB, set()),  # asks whether its weight is uint8 before it reads it
    "Swinv2": ("ForImageClassification", SWIN, {"0"}),
    "Llama": ("ForCausalLM", SMALL | dict(intermediate_size=96, num_attention_heads=4), set()),
}
"""The class, its sizes, and the layers that are read."""


def made(name: str) -> nn.Module:
    kind, sizes, _ = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, f"{name}{kind}")(getattr(transformers, f"{name}Config")(**sizes)).eval()


@torch.no_grad()
def result(model: nn.Module) -> Tensor:
    if "waveform" in str(model.main_input_name) or "input_values" in model.main_input_name:
        return model(torch.randn(1, 2000, generator=torch.Generator().manual_seed(1))).last_hidden_state
    if model.main_input_name == "pixel_values":
        return model(torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))).logits
    decoder = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    return model(input_ids=IDS, **decoder).logits


@pytest.mark.parametrize("name", MODELS)
def test_such_layers_stay_float_and_the_model_computes(name: str) -> None:
    model, read = made(name), MODELS[name][2]
    wanted = result(model)
    report = lowbit.quantize_(model, lowbit.int8_weight_only())
    left = {row.layer: row.note for row in report.rows if not row.format}
    assert {layer.rpartition(".")[2] for layer in left} == read
    assert all(note.endswith(" reads its weight") for note in left.values())
    packed = [module for module in model.modules() if isinstance(module, lowbit.QuantLinear)]
    assert len(packed) >= 4
    error = (result(model) - wanted).norm() / wanted.norm()
    assert 0 < error < 0.1
    assert name == "WavLM" or result(model.train()).isfinite().all()


def test_a_model_answers_with_4_bits_and_its_tied_table_is_packed() -> None:
    for name in ("T5", "Mamba"):
        model = made(name)
        lowbit.quantize_(model, lowbit.int4_weight_only(group_size=32))
        assert model.generate(IDS, max_new_tokens=8, do_sample=False).shape[1] > 1
    packed = model.get_output_embeddings()._parameters["weight"]
    assert packed.dtype is torch.uint8 and packed is model.get_input_embeddings().weight


@pytest.mark.parametrize("name", ["Mamba", "FalconMamba", "Mamba2"])
def test_a_head_of_which_the_dtype_is_read_is_packed_and_says_it(name: str, tmp_path: Path) -> None:
    """Through copies, pickles, saving, another dtype and back to a float layer."""
    model = made(name)
    lowbit.quantize_(model, lowbit.int8_weight_only())
    wanted, head = result(model), model.lm_head
    assert isinstance(head, lowbit.QuantLinear) and head.weight.dtype is torch.float32
    assert head._parameters["weight"].dtype is torch.uint8 and head.weight.data_ptr() == head._parameters["weight"].data_ptr()
    assert model.state_dict()["lm_head.weight"].dtype is torch.uint8
    assert "float32" in repr(head.weight)
    torch.save(model, tmp_path / "model.pt")
    model.save_pretrained(tmp_path / "folder")
    by_load = made(name)
    lowbit.load(by_load, tmp_path / "folder")
    loaded = (
        torch.load(tmp_path / "model.pt", weights_only=False),
        type(model).from_pretrained(tmp_path / "folder").eval(),
        by_load,
        copy.deepcopy(model),
    )
    for other in loaded:
        assert type(other.lm_head) is type(head) and other.lm_head.weight.dtype is torch.float32
        assert result(other).equal(wanted)
    other = loaded[-1].bfloat16()
    assert other.lm_head.weight.dtype is torch.bfloat16
    assert (result(other).float() - wanted).norm() < 0.05 * wanted.norm()
    lowbit.dequantize_(model)
    assert type(model.lm_head) is nn.Linear and vars(model.lm_head).keys() == vars(made(name).lm_head).keys()
    assert (result(model) - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize("name", ["T5", "Mamba"])
def test_from_pretrained_leaves_them_too(name: str, tmp_path: Path) -> None:
    made(name).save_pretrained(tmp_path / "float")
    config = lowbit.LowbitConfig("int8_weight_only")
    cls = getattr(transformers, f"{name}{MODELS[name][0]}")
    model = cls.from_pretrained(tmp_path / "float", quantization_config=config)
    lowbit.quantize_checkpoint(tmp_path / "float", tmp_path / "packed", "int8_weight_only")
    for loaded in (model, cls.from_pretrained(tmp_path / "packed")):
        floats = {layer.rpartition(".")[2] for layer, module in loaded.named_modules() if type(module) is nn.Linear}
        assert floats - {"lm_head"} == MODELS[name][2] - {"lm_head"}
        assert result(loaded).isfinite().all()


def test_a_filter_that_takes_one_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"dt_proj cannot be quantized: MambaMixer reads its weight"):
        lowbit.quantize_(made("Mamba"), lowbit.int8_weight_only(), lambda module, _: isinstance(module, nn.Linear))


def test_autoquant_leaves_them() -> None:
    model = made("Mamba")
    plan = lowbit.autoquant(model, IDS, min_sqnr=20, cache=False)
    assert "MambaMixer reads its weight" in str(plan)
    assert result(model).isfinite().all()


class OfAUser(transformers.models.t5.modeling_t5.T5DenseActDense):
    """A subclass has what it does not replace."""


class WithItsOwn(transformers.models.t5.modeling_t5.T5DenseActDense):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.wo(self.act(self.wi(hidden_states)))


def test_subclasses_of_others() -> None:
    kinds: dict[type[nn.Module], Callable[[dict[int, str]], bool]] = {OfAUser: bool, WithItsOwn: lambda read: not read}
    for cls, expected in kinds.items():
        assert expected(weights_that_are_read(nn.Sequential(cls(transformers.T5Config(**T5)))))


def table() -> dict[str, set[str]]:
    """The table by methods."""
    found: dict[str, set[str]] = {}
    for layers, readers in (*READ_BY.items(), *DTYPE_READ_BY.items()):
        for reader in readers.split():
            found.setdefault(reader if reader.count(".") == 2 else f"{reader}.forward", set()).update(layers.split())
    return found


OF_ITS_OWN_LINEAR = {"falcon.FalconFlashAttention2.forward": {"query_key_value"}}
"""Layers of a class of the model, a subclass of nn.Linear."""


def test_the_table_is_what_the_source_of_transformers_shows() -> None:
    shown = read_in_models(Path(transformers.__file__).parent) | OF_ITS_OWN_LINEAR
    assert len(shown) > 80
    assert table() == shown


def test_a_class_of_the_same_name_elsewhere_is_not_meant() -> None:
    other = type("T5DenseActDense", (nn.Module,), {"__module__": "mine.models.t5"})
    model = other()
    model.wo = nn.Linear(4, 4)
    assert not weights_that_are_read(model)
    model.__class__ = type("T5DenseActDense", (nn.Module,), {"__module__": "transformers.models.t5.modeling_t5"})
    assert weights_that_are_read(model) == {id(model.wo): "T5DenseActDense reads its weight"}
