# SPDX-License-Identifier: Apache-2.0
"""A .pt2 of AOTInductor: its ops by torch's executor, and as C functions; in Python and in a process that imports torch alone."""

from __future__ import annotations

import ctypes
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import lowbit
from lowbit import _C

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ on this machine")
SIZES = ((2, 6), (1, 1), (5, 3), (3, 40))


class Attention(nn.Module):
    """Every op of inference that a trace holds but dequantize; also masks, mods and tensors that they capture."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.out = nn.Embedding(50, 64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.slope = nn.Parameter(torch.randn(2))

    def forward(self, tokens: Tensor) -> Tensor:
        (batch, length), x = tokens.shape, self.words(tokens)
        q, k, v = self.qkv(x).view(batch, length, 3, 2, 32).permute(2, 0, 3, 1, 4)
        cache = lowbit.QuantizedKVCache("int8")
        cache.append(0, k, v)
        y = cache.attend(0, q, window=4) + self.more(q, k, v)
        return torch.relu(self.out(y.transpose(1, 2).reshape(batch, length, 64))) + x

    def more(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        biased = lowbit.flex_attention(q, k, v, lambda s, b, h, i, j: s + self.slope[h] * (i - j))
        return lowbit.scaled_dot_product_attention(q, k, v, mask) + biased


class Cached(Attention):
    """The same without the op attention_forward."""

    def more(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v


class Experts(nn.Module):
    """Experts as transformers keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 64) / 8)
        self.down_proj = nn.Parameter(torch.randn(4, 64, 32) / 8)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gate, up = torch.einsum("tk,tjnk->tjn", hidden_states, self.gate_up_proj[top_k_index]).chunk(2, -1)
        each = torch.einsum("tjk,tjnk->tjn", self.act_fn(gate) * up, self.down_proj[top_k_index])
        return (each * top_k_weights[..., None]).sum(1)


def called_with(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    index = torch.randint(0, 4, (tokens, 2), generator=generator)
    return torch.randn(tokens, 64, generator=generator), index, torch.rand(tokens, 2, generator=generator)


@pytest.fixture(scope="module", params=["executor", "c"])
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, nn.Module]:
    """How ops are called, the .pt2, and the model."""
    torch.manual_seed(0)
    in_c = request.param == "c"
    model = (Attention if in_c else Cached)().eval()
    lowbit.quantize_(
        model, lowbit.int8_weight_only(), lambda module, name: isinstance(module, (nn.Embedding, nn.Linear))
    )
    shapes = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=64)}
    path = tmp_path_factory.mktemp("pt2") / f"{request.param}.pt2"
    with torch.no_grad():
        program = torch.export.export(model, (torch.randint(0, 50, SIZES[0]),), dynamic_shapes=(shapes,))
        configs = lowbit.compile_options() | (lowbit.c_shim_options() if in_c else {})
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=configs)
    return request.param, path, model


@torch.no_grad()
def test_every_size_is_that_of_eager_mode(package: tuple[str, Path, nn.Module]) -> None:
    _, path, model = package
    run = torch._inductor.aoti_load_package(str(path))
    for size in SIZES:
        tokens = torch.randint(0, 50, size)
        torch.testing.assert_close(run(tokens), model(tokens), atol=1e-5, rtol=1e-5)


def test_ops_are_called_as_asked_for(package: tuple[str, Path, nn.Module]) -> None:
    how, path, _ = package
    with zipfile.ZipFile(path) as archive:
        source = "".join(archive.read(name).decode() for name in archive.namelist() if name.endswith("wrapper.cpp"))
    by_executor = source.count("aoti_torch_proxy_executor_call_function(")
    calls = {name: source.count(f"aoti_torch_cpu_{name}(") for name in _C.c_declarations()}
    if how == "executor":
        assert by_executor == 6 and not any(calls.values())  # one embedding, 2 linear, 2 kv_quantize_, decode
    else:
        assert by_executor == 0
        assert {name: count for name, count in calls.items() if count} == {
            "linear": 2, "embedding": 1, "attention_forward": 2, "decode": 1, "kv_quantize_": 2,
        }  # fmt: skip


@torch.no_grad()
def test_it_runs_where_torch_alone_is_imported(
    package: tuple[str, Path, nn.Module], python: Callable[..., str], installed: str, tmp_path: Path
) -> None:
    _, path, model = package
    tokens = torch.randint(0, 50, (3, 7))
    torch.save((tokens, model(tokens)), tmp_path / "data.pt")
    code = """
import sys, torch
tokens, wanted = torch.load(sys.argv[2])
torch.testing.assert_close(torch._inductor.aoti_load_package(sys.argv[1])(tokens), wanted, atol=1e-5, rtol=1e-5)
print("ok")
"""
    assert "ok" in python(code, str(path), str(tmp_path / "data.pt"), PYTHONPATH=installed)


def test_an_error_of_an_op_is_told(package: tuple[str, Path, nn.Module], capfd: pytest.CaptureFixture[str]) -> None:
    how, path, _ = package
    run = torch._inductor.aoti_load_package(str(path))
    with pytest.raises(Exception, match="embedding" if how == "c" else "indices must be 0..49"):
        run(torch.full((2, 3), 50))
    assert how == "executor" or "lowbit: embedding: indices must be 0..49" in capfd.readouterr().err


def test_a_pt2_of_another_schema_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    library = ctypes.CDLL(str(Path(_C.__file__).parent / "liblowbit.so"))
    library.lowbit_c_shim.restype = ctypes.c_void_p
    shim = ctypes.CFUNCTYPE(ctypes.c_int32)(library.lowbit_c_shim(b"linear(Tensor x) -> Tensor"))
    assert shim() == 1
    assert (
        "lowbit: linear(Tensor x) -> Tensor: this lowbit has another schema: compile the .pt2 again"
        in capfd.readouterr().err
    )


def test_all_but_lists_of_results_can_be_called_in_c() -> None:
    ops = [row["op"].removeprefix("lowbit::") for row in _C.register_torch()]
    assert sorted(_C.c_declarations()) == sorted(set(ops) - {"attention_backward"})


@torch.no_grad()
@pytest.mark.parametrize("in_c", [False, True], ids=["executor", "c"])
def test_experts_have_the_bits_of_eager_mode_for_any_number_of_tokens(in_c: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = Experts().eval()
    report = lowbit.quantize_(layer, lowbit.int8_dynamic_activation_int4_weight(group_size=32))
    assert len(report.quantized) == 2
    given = [called_with(tokens) for tokens in (6, 1, 40)]
    tokens = Dim("tokens", min=1, max=64)
    program = torch.export.export(layer, given[0], dynamic_shapes=({0: tokens},) * 3)
    assert [str(node.target) for node in program.graph.nodes if "lowbit" in str(node.target)] == ["lowbit.experts.default"]
    configs = lowbit.compile_options() | (lowbit.c_shim_options() if in_c else {})
    path = str(tmp_path / "experts.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=configs)
    run = torch._inductor.aoti_load_package(path)
    for arguments in given:
        assert torch.equal(run(*arguments), layer(*arguments))
