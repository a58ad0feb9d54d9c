# SPDX-License-Identifier: Apache-2.0
"""load: what was saved of a quantized model comes back into a float one, on the cpu or the meta device."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import lowbit
from lowbit.quant import QuantLinear


def build(device: str = "cpu") -> nn.Module:
    with torch.device(device):
        return nn.Sequential(
            nn.Linear(100, 33),
            nn.ReLU(),
            nn.Sequential(nn.Linear(33, 65, bias=False), nn.Tanh(), nn.Linear(65, 9)),
            nn.LayerNorm(9),
        )


def saved(model: nn.Module, path: Path) -> Path:
    if path.suffix == ".safetensors":
        pytest.importorskip("safetensors.torch").save_file(model.state_dict(), path)
    else:
        torch.save(model.state_dict(), path)
    return path


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_file_comes_back_bit_for_bit(config, model, x, tmp_path, suffix, device):
    model = nn.Sequential(*model, nn.LayerNorm(9))
    lowbit.quantize_(model, config)
    file = saved(model, tmp_path / f"model{suffix}")
    fresh = build(device)
    first = fresh[0]
    assert lowbit.load(fresh, file) == ["0", "2.0", "2.2"]
    assert fresh[0] is first and type(first) is QuantLinear
    assert first.spec.layout(33, 100) == model[0].spec.layout(33, 100)
    assert torch.equal(fresh(x), model(x))
    assert not any(tensor.is_meta for tensor in fresh.state_dict().values())
    assert first.bias.requires_grad and not first.weight.requires_grad
    assert lowbit.load(fresh, str(file)) == [] and torch.equal(fresh(x), model(x))
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(copy.deepcopy(fresh).state_dict(), model.state_dict())


def test_formats_may_differ_by_layer_and_some_stay_float(model, x):
    lowbit.quantize_(model, lowbit.int4_weight_only(32), lambda m, name: name == "0")
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int8_weight(), lambda m, name: name == "2.2")
    fresh = build()[:3]
    assert lowbit.load(fresh, model.state_dict()) == ["0", "2.2"]
    assert type(fresh[2][0]) is nn.Linear and torch.equal(fresh(x), model(x))


def test_a_float_state_dict_is_loaded_as_it_is(model, x):
    fresh = build("meta")[:3]
    assert lowbit.load(fresh, model.state_dict()) == [] and torch.equal(fresh(x), model(x))


@pytest.mark.parametrize("drop_second", [False, True], ids=["torch", "safetensors"])
def test_layers_that_shared_a_weight_share_it_again(drop_second, tied):
    model, x = tied(), torch.randn(2, 50)
    lowbit.quantize_(model, lowbit.int8_weight_only())
    state = model.state_dict()
    if drop_second:
        del state["1.weight"]
    fresh = tied()
    lowbit.load(fresh, state)
    assert fresh[0].weight is fresh[1].weight and torch.equal(fresh(x), model(x))


def test_a_head_untied_from_its_embedding_by_quantizing_stays_untied():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 40), nn.Linear(40, 50, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    model, ids = Tied(), torch.tensor([1, 2])
    lowbit.quantize_(model, lowbit.int8_weight_only())
    fresh = Tied()
    lowbit.load(fresh, model.state_dict())
    assert type(fresh.head) is QuantLinear and torch.equal(fresh(ids), model(ids))
    state = model.state_dict()
    del state["head.weight"]
    with pytest.raises(
        ValueError, match=r"load: head.weight must be a packed weight of n=50 k=40 .*got float32 \[50, 40\]"
    ):
        lowbit.load(Tied(), state)


def from_another_layer(state: dict) -> None:
    state["0.weight"], state["0.layout"] = state["2.2.weight"], state["2.2.layout"]


WRONG = {
    "without layout": (lambda state: state.pop("0.layout"), r"0.weight must be a packed weight of n=33 k=100 with its layout, got uint8 .* without one"),
    "of another layer": (from_another_layer, "0.weight must be a packed weight of n=33 k=100 .*n=9 k=65"),
    "another version": (lambda state: state["0.layout"][0].add_(2), "0.weight must be .* layout version 4, known are 1 to 3"),
    "another layout": (lambda state: state["0.layout"][-1].add_(9), "0.weight must be .* layout 9, known are 0 x86-panel-16x64, 1 row-major"),
    "cut short": (lambda state: state.update({"0.weight": state["0.weight"][:1]}), r"0.weight must be .*got uint8 \[1, "),
    "a tensor of another shape": (lambda state: state.update({"2.2.bias": torch.zeros(8)}), r"2.2.bias must have shape \[9\], got \[8\]"),
    "a name is missing": (lambda state: state.pop("2.2.bias"), "names must be those of the model, missing 2.2.bias, unexpected none"),
    "an unknown name": (lambda state: state.update({"7.weight": torch.zeros(1)}), "names must be those of the model, missing none, unexpected 7.weight"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "text"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_refused_and_the_model_stays_as_it_was(model, x, change, text):
    lowbit.quantize_(model, lowbit.int8_weight_only())
    state = model.state_dict()
    change(state)
    fresh = build()[:3]
    wanted, types = fresh(x), [type(module) for module in fresh.modules()]
    with pytest.raises(ValueError, match=f"load: {text}"):
        lowbit.load(fresh, state)
    assert [type(module) for module in fresh.modules()] == types and torch.equal(fresh(x), wanted)


def test_another_format_into_a_quantized_model_is_refused(model):
    lowbit.quantize_(model, lowbit.int8_weight_only())
    fresh = build()[:3]
    lowbit.quantize_(fresh, lowbit.int4_weight_only())
    with pytest.raises(ValueError, match="load: 0 is quantized as int4 g128, got int8 per-channel"):
        lowbit.load(fresh, model.state_dict())


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="load: .*no.pt must be a file or a folder, and does not exist"):
        lowbit.load(build(), tmp_path / "no.pt")
    with pytest.raises(FileNotFoundError, match="must hold one of model.safetensors.index.json"):
        lowbit.load(build(), tmp_path)


def text(path: Path) -> None:
    path.write_text("no checkpoint")


def pickled(path: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(4, 4)), path)


OTHERS = {
    "a text": (text, "a.pt", "be a .safetensors file, or one of torch.save.*got a file that begins with b'no check'"),
    "a text named safetensors": (text, "a.safetensors", "must be a safetensors file: the header must have 2 to"),
    "nothing": (lambda path: path.write_bytes(b""), "a.pt", "got a file that begins with b''"),
    "a pickled model": (pickled, "a.pt", "got a pickled torch.nn.modules.container.Sequential: save its state_dict"),
    "a gguf file": (lambda path: path.write_bytes(b"GGUF" + bytes(20)), "a.gguf", "got a GGUF file, which lowbit.load_gguf reads"),
    "more than a state dict": (lambda path: torch.save({"epoch": 3, "model": {}}, path), "a.pt", "hold a state dict of tensors; save model.state_dict"),
    "half of a file": (lambda path: (torch.save({"a": torch.ones(99)}, path), path.write_bytes(path.read_bytes()[:500])), "a.pt", "got one that torch.load refuses: RuntimeError: "),
}  # fmt: skip


@pytest.mark.parametrize(("write", "name", "message"), OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("mmap", [None, True, False])
def test_another_file_is_told_what_is_wanted(write, name, message, mmap, tmp_path):
    write(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} .*{message}"):
        lowbit.load(build(), tmp_path / name, mmap=mmap)


def test_a_name_of_the_hub_says_how_it_is_loaded():
    with pytest.raises(FileNotFoundError, match="someone/some-model-4bit must be a file or a folder, and does not exist; a model of the Hugging Face Hub is loaded by from_pretrained"):
        lowbit.load(build(), "someone/some-model-4bit")


def is_mapped(path: Path) -> bool:
    return str(path.resolve()) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("mmap", [None, True, False])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_what_is_not_mapped_may_change_later(model, x, tmp_path, suffix, mmap):
    if not Path("/proc/self/maps").exists():
        pytest.skip("reads Linux's /proc")
    lowbit.quantize_(model, lowbit.int8_weight_only())
    file, wanted = saved(model, tmp_path / f"model{suffix}"), model(x)
    fresh = build("meta")[:3]
    lowbit.load(fresh, file, mmap=mmap)
    assert is_mapped(file) == (suffix == ".safetensors" if mmap is None else mmap)
    assert torch.equal(fresh(x), wanted)
    if not is_mapped(file):  # else the process would end
        size = file.stat().st_size
        file.write_bytes(b"")
        file.write_bytes(b"\xff" * size)
        assert torch.equal(fresh(x), wanted)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_model_may_be_saved_into_the_file_that_it_was_loaded_from(model, x, tmp_path, suffix):
    lowbit.quantize_(model, lowbit.int8_weight_only())
    file, fresh = saved(model, tmp_path / f"model{suffix}"), build("meta")[:3]
    lowbit.load(fresh, file)
    lowbit.load(build("meta")[:3], saved(fresh, file))
    assert torch.equal(fresh(x), model(x))


class SharedTables(nn.Module):
    def __init__(self, are_tied: bool = True) -> None:
        super().__init__()
        self.emb, self.linear, self.copy = nn.Embedding(50, 64), nn.Linear(64, 64), nn.Embedding(50, 64)
        if are_tied:
            self.copy.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.emb(ids) + self.copy(ids))


@pytest.mark.parametrize("are_tied", [True, False])
@pytest.mark.parametrize("config", [None, lowbit.int8_weight_only(), lowbit.int4_weight_only(32)], ids=str)
@pytest.mark.parametrize("mmap", [None, False])
def test_a_file_of_save_model_with_tied_tensors(config, are_tied, mmap, tmp_path):
    """It holds one name of a tensor, the least, and transformers' files the first."""
    save_model = pytest.importorskip("safetensors.torch").save_model
    model, ids = SharedTables(), torch.tensor([1, 2])
    if config is not None:
        lowbit.quantize_(model, config, filter_fn=lambda module, name: name != "")
    save_model(model, tmp_path / "model.safetensors")
    fresh = SharedTables(are_tied)
    lowbit.load(fresh, tmp_path / "model.safetensors", mmap=mmap)
    assert torch.equal(fresh(ids), model(ids)) and (fresh.copy.weight is fresh.emb.weight) == are_tied


@pytest.mark.parametrize("mmap", [None, False])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_damaged_file_is_refused_by_its_name_or_loads(model, tmp_path, suffix, mmap, monkeypatch):
    """Bits flipped and ends cut: a ValueError with the file's name, and no other error, or values that it could have."""
    lowbit.quantize_(model, lowbit.int8_weight_only())
    path = saved(model, tmp_path / f"model{suffix}")
    whole, generator, refused = path.read_bytes(), torch.Generator().manual_seed(0), 0
    header = 8 + int.from_bytes(whole[:8], "little") if suffix == ".safetensors" else len(whole)
    for trial in range(150):
        damaged = bytearray(whole)
        for at in torch.randint(header if trial % 3 else len(whole), (1 + trial % 4,), generator=generator).tolist():
            damaged[at] ^= 1 << int(torch.randint(8, (1,), generator=generator))
        if trial % 10 == 0:
            del damaged[int(torch.randint(len(whole), (1,), generator=generator)) :]
        path.unlink()  # it may be mapped
        path.write_bytes(damaged)
        try:
            lowbit.load(build("meta")[:3], path, mmap=mmap)
        except (ValueError, OSError) as error:
            assert path.name in str(error)
            refused += 1
    assert 15 < refused < 150


def test_a_buffer_that_no_file_holds_is_not_left_on_the_meta_device(model):
    def with_table() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 16))
        model.register_buffer("table", torch.arange(3.0), persistent=False)
        return model

    model = with_table()
    lowbit.quantize_(model, lowbit.int8_weight_only())
    with torch.device("meta"):
        fresh = with_table()
    with pytest.raises(
        ValueError, match="load: table must have values, which no file holds, got the meta device; build the model on the cpu"
    ):
        lowbit.load(fresh, model.state_dict())
    lowbit.load(with_table(), model.state_dict())


def test_an_encoder_layer_works_after_loading():
    def encoder() -> nn.Module:
        torch.manual_seed(0)
        return nn.TransformerEncoderLayer(32, 4, 96, batch_first=True).eval()

    model, x = encoder(), torch.randn(2, 5, 32)
    lowbit.quantize_(model, lowbit.int8_weight_only())
    fresh = encoder()
    lowbit.load(fresh, model.state_dict())
    with torch.inference_mode():
        assert torch.equal(fresh(x), model(x))
