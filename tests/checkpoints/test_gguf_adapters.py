# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in GGUF files, written by the gguf package as llama.cpp's convert_lora_to_gguf.py writes them: what they
add, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

gguf = pytest.importorskip("gguf")
pytest.importorskip("peft")

import gguf_files  # noqa: E402
from gguf_files import CONFIGS  # noqa: E402

import lowbit  # noqa: E402
from lowbit.checkpoints.gguf.file import GgufFile  # noqa: E402
from lowbit.huggingface.load_gguf import load_model  # noqa: E402

LINEAR = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "attn_qkv")
ALPHA = 12.0


def write_adapter(
    path: Path,
    model: Path,
    names: Callable[[str], bool] = lambda name: name.split(".")[-2] in LINEAR,
    rank: Callable[[str], int] = lambda name: 4,
    type: str = "F32",
    more: Callable[[Any], None] = lambda writer: None,
    architecture: str | None = None,
    alpha: float | None = ALPHA,
    keys: dict[str, str] | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """An adapter of the tensors of a file whose names are taken; returns its factors."""
    file = GgufFile.open(model)
    writer, random = gguf.GGUFWriter(path, architecture or file.architecture), np.random.default_rng(5)
    for key, value in ({"general.type": "adapter", "adapter.type": "lora"} if keys is None else keys).items():
        writer.add_string(key, value)
    writer.add_name("tiny adapter")
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    factors = {}
    for name, tensor in file.tensors.items():
        if len(tensor.shape) != 2 or not names(name):
            continue
        (n, k), r = tensor.shape, rank(name)
        down, up = (random.normal(0, 0.1, shape).astype(np.float32) for shape in ((r, k), (n, r)))
        kinds = {"F32": gguf.GGMLQuantizationType.F32, "F16": gguf.GGMLQuantizationType.F16}
        kind = kinds.get(type) or gguf.GGMLQuantizationType[type]
        stored = [gguf.quants.quantize(each, kind) for each in (down, up)]
        factors[name] = tuple(torch.from_numpy(gguf.quants.dequantize(each, kind).copy()) for each in stored)
        for end, each in zip(("lora_a", "lora_b"), stored, strict=True):
            writer.add_tensor(f"{name}.{end}", each, raw_dtype=kind)
    more(writer)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    return factors


def with_sums(model: Path, to: Path, name: str, factors: dict[str, tuple[Tensor, Tensor]], alpha: float) -> nn.Module:
    """The model of a float32 file to whose tensors the products were added, in the order of llama.cpp."""
    gguf_files.write(to, name, "F32")
    data, file = bytearray(to.read_bytes()), GgufFile.open(to)
    for tensor, (down, up) in factors.items():
        scaling = alpha / len(down) if alpha else 1.0
        at = file.tensors[tensor]
        weight = torch.frombuffer(at.data, dtype=torch.float32).view(at.shape).double()
        weight += scaling * up.double() @ down.double()
        data[at.begin : at.begin + at.nbytes] = weight.float().numpy().tobytes()
    to.write_bytes(data)
    return load_model(to, activations="float", attn_implementation="eager", fuse=False)


@torch.no_grad()
def logits(model: nn.Module, length: int = 20) -> Tensor:
    return model(torch.arange(2, 2 + length)[None] % 60).logits


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("gpt2",)])
def test_the_sum_is_that_of_the_weights_of_the_file(name: str, fuse: bool, tmp_path: Path) -> None:
    """Of each architecture; llama.cpp adds to the tensors as they lie in the file, with rows of q and k permuted."""
    file = gguf_files.write(tmp_path / "model.gguf", name, "F32")
    factors = write_adapter(tmp_path / "adapter.gguf", file)
    wanted = with_sums(file, tmp_path / "sums.gguf", name, factors, ALPHA)
    model = load_model(file, activations="float", fuse=fuse)
    before = logits(model)
    model = lowbit.load_gguf_adapter(model, tmp_path / "adapter.gguf")
    assert not torch.allclose(logits(model), before, rtol=0.05)
    torch.testing.assert_close(logits(model), logits(wanted), rtol=1e-3, atol=1e-3)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)


def test_gpt2_has_layers_that_are_turned(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "model.gguf", "gpt2", "F32")
    factors = write_adapter(tmp_path / "adapter.gguf", file)
    assert len(factors) == 8
    wanted = with_sums(file, tmp_path / "sums.gguf", "gpt2", factors, ALPHA)
    model = lowbit.load_gguf_adapter(load_model(file, activations="float"), tmp_path / "adapter.gguf")
    torch.testing.assert_close(logits(model), logits(wanted), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("type", ["F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("alpha", [ALPHA, 0.0, None])
def test_types_ranks_and_alpha(type: str, alpha: float | None, tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "model.gguf", "llama", "F32")
    rank = lambda name: 64 if ".ffn" in name else 32  # noqa: E731
    factors = write_adapter(tmp_path / "adapter.gguf", file, type=type, rank=rank, alpha=alpha)
    wanted = with_sums(file, tmp_path / "sums.gguf", "llama", factors, alpha or 0.0)
    model = lowbit.load_gguf_adapter(load_model(file, activations="float"), tmp_path / "adapter.gguf")
    torch.testing.assert_close(logits(model), logits(wanted), rtol=1e-3, atol=1e-3)
    held = model.get_base_model().model.layers[1].mlp.down_proj.lora_A["default"].weight
    assert held.equal(factors["blk.1.ffn_down.weight"][0])


def test_several_by_name(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "model.gguf", "llama", "Q4_0")
    write_adapter(tmp_path / "one.gguf", file, lambda name: "attn_q" in name or "blk.1.ffn_up" in name, rank=lambda name: 8 if "ffn" in name else 4)
    write_adapter(tmp_path / "two.gguf", file, lambda name: name.endswith(("ffn_down.weight", "output.weight")))
    alone = []
    for name in ("one", "two"):
        alone.append(logits(lowbit.load_gguf_adapter(load_model(file), tmp_path / f"{name}.gguf")))
    plain = load_model(file)
    before = logits(plain)
    model = lowbit.load_gguf_adapter(plain, tmp_path / "one.gguf", adapter_name="one")
    assert lowbit.load_gguf_adapter(model, tmp_path / "two.gguf", adapter_name="two") is model
    assert not model.training and torch.equal(logits(model), alone[0])
    for name, wanted in zip(("two", "one"), alone[::-1], strict=True):
        model.set_adapter(name)
        assert torch.equal(logits(model), wanted) and not torch.equal(wanted, before)
    with pytest.raises(ValueError, match="load_gguf_adapter: adapter_name must be a new one, got 'two' beside one, two"):
        lowbit.load_gguf_adapter(model, tmp_path / "one.gguf", adapter_name="two")


def vector(writer: Any) -> None:
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(256, dtype=np.float32))


def one_factor(name: str, *shape: int) -> Callable[[Any], None]:
    return lambda writer: writer.add_tensor(name, np.ones(shape, dtype=np.float32))


def pair_of(name: str, down: tuple[int, ...], up: tuple[int, ...], value: float = 1.0) -> Callable[[Any], None]:
    def more(writer: Any) -> None:
        for end, shape in (("lora_a", down), ("lora_b", up)):
            writer.add_tensor(f"{name}.{end}", np.full(shape, value, dtype=np.float32))

    return more


NONE = lambda name: False  # noqa: E731
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a model": ({"keys": {"general.type": "model"}}, "general.type of an adapter must be 'adapter', got 'model'"),
    "no type": ({"keys": {}}, "general.type of an adapter must be 'adapter', got None"),
    "a control vector": ({"keys": {"general.type": "adapter", "adapter.type": "control"}}, "adapter.type of an adapter must be 'lora', got 'control'"),
    "of another architecture": ({"architecture": "qwen2"}, "general.architecture must be that of the model, llama, got 'qwen2'"),
    "of an unknown architecture": ({"architecture": "nobody"}, "general.architecture must be that of the model, llama, got 'nobody'"),
    "an unknown key": ({"more": lambda writer: writer.add_uint32("adapter.lora.magnitude", 1)}, "got adapter.lora.magnitude"),
    "words that invoke it": ({"more": lambda writer: writer.add_array("adapter.alora.invocation_tokens", [1, 2])}, "got adapter.alora.invocation_tokens"),
    "alpha that is inf": ({"alpha": float("inf")}, "adapter.lora.alpha must be a finite number, got inf"),
    "no tensor": ({"names": NONE}, "must have factors NAME.lora_a and NAME.lora_b, got no tensor"),
    "a norm": ({"more": vector}, "every tensor must be a factor, NAME.lora_a or NAME.lora_b, got blk.0.attn_norm.weight"),
    "one factor": ({"names": NONE, "more": one_factor("blk.0.attn_q.weight.lora_a", 4, 256)}, "blk.0.attn_q.weight must have lora_a and lora_b, got lora_a alone"),
    "a layer that is not there": ({"names": NONE, "more": pair_of("blk.2.attn_q.weight", (4, 256), (256, 4))}, "got one for blk.2.attn_q.weight, which is nothing of the model"),
    "embeddings": ({"names": NONE, "more": pair_of("token_embd.weight", (64, 4), (256, 4))}, "got one for token_embd.weight, which is an embedding, model.embed_tokens"),
    "a norm's product": ({"names": NONE, "more": pair_of("blk.0.attn_norm.weight", (4, 256), (256, 4))}, "which is model.layers.0.input_layernorm.weight"),
    "another size": ({"names": NONE, "more": pair_of("blk.0.attn_k.weight", (4, 256), (256, 4))}, r"blk.0.attn_k.weight of the model has shape \[128, 256\], so lora_a and lora_b must be \[r, 256\] and \[128, r\], got \[4, 256\] and \[256, 4\]"),
    "two ranks": ({"names": NONE, "more": pair_of("blk.0.attn_k.weight", (4, 256), (128, 5))}, r"got \[4, 256\] and \[128, 5\]"),
    "numbers that are nan": ({"names": NONE, "more": pair_of("blk.0.attn_k.weight", (4, 256), (128, 4), float("nan"))}, "must be finite, got inf or nan"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, tmp_path: Path) -> None:
    options, text = REFUSED[what]
    file = gguf_files.write(tmp_path / "model.gguf", "llama", "Q4_0")
    write_adapter(tmp_path / "adapter.gguf", file, **options)
    model = load_model(file)
    with pytest.raises(ValueError, match=f"adapter.gguf.*{text}"):
        lowbit.load_gguf_adapter(model, tmp_path / "adapter.gguf")
    assert not hasattr(model, "peft_config") and not any("lora" in name for name, _ in model.named_modules())


def test_a_tied_head_is_refused(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "model.gguf", "tied", "Q4_0")
    write_adapter(tmp_path / "adapter.gguf", file, NONE, more=pair_of("output.weight", (4, 256), (64, 4)))
    with pytest.raises(ValueError, match="output.weight, which is the head lm_head, which shares its weight with the embedding"):
        lowbit.load_gguf_adapter(load_model(file), tmp_path / "adapter.gguf")


def test_what_is_no_file(tmp_path: Path) -> None:
    model = load_model(gguf_files.write(tmp_path / "model.gguf", "llama", "Q4_0"))
    with pytest.raises(FileNotFoundError):
        lowbit.load_gguf_adapter(model, tmp_path / "none.gguf")
    with pytest.raises(ValueError, match="load_gguf_adapter: file must be None unless path is a repository of the Hub"):
        lowbit.load_gguf_adapter(model, tmp_path / "none.gguf", "Q8_0")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "model.gguf").read_bytes()[:1000])
    with pytest.raises(ValueError, match="cut.gguf"):
        lowbit.load_gguf_adapter(model, tmp_path / "cut.gguf")
