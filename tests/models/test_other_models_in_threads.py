# SPDX-License-Identifier: Apache-2.0
"""Functions that change a model, run in two threads at once, change nothing else: models that other threads serve say
what they said, and the functions, classes and tables of other packages are what they were."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import torch
from decoders import CONFIGS, in_float, logits, made, prompt, transformers
from foreign_functions import callables_and_tables
from torch import Tensor, nn

import lowbit
from lowbit.quant.fused import Fused
from lowbit.training import QATConfig

W4A8, WORDS = CONFIGS["w4a8"], prompt() % 64  # which each of the models has
PACKAGES = ("transformers", "torch", "peft")


def plain() -> nn.Module:
    return in_float("Llama", {}, "sdpa")


def packed(name: str = "llama") -> Callable[[], nn.Module]:
    return lambda: made(name)


def fuse(model: nn.Module, _: Path) -> nn.Module:
    fused = lowbit.fuse(model)
    assert {"model", "model.layers.0", "model.layers.1"} <= set(fused), fused.left
    return model


def fuse_what_stays(model: nn.Module, _: Path) -> nn.Module:
    assert lowbit.fuse(model).left
    return model


def load_gguf(_: nn.Module, folder: Path) -> nn.Module:
    model, _ = lowbit.load_gguf(folder / "model.gguf")
    assert isinstance(model.model, Fused)
    return model


def from_pretrained(_: nn.Module, folder: Path) -> nn.Module:
    config = lowbit.LowbitConfig("int8_weight_only()", fuse=True)
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "float", quantization_config=config)


def quantize(model: nn.Module, _: Path) -> nn.Module:
    lowbit.quantize_(model, W4A8)
    return model


def train(model: nn.Module, _: Path) -> nn.Module:
    lowbit.quantize_(model, QATConfig(W4A8))
    lowbit.quantize_(model, QATConfig(W4A8, step="convert"))
    return model


def rotate(model: nn.Module, _: Path) -> nn.Module:
    lowbit.rotate_(model)
    return model


def smooth(model: nn.Module, _: Path) -> nn.Module:
    lowbit.smooth_(model, [WORDS], W4A8)
    return model


def calibrate(model: nn.Module, _: Path) -> nn.Module:
    lowbit.calibrate(model, [WORDS])
    return model


def autoquant(model: nn.Module, _: Path) -> nn.Module:
    lowbit.autoquant(model, WORDS, candidates=[W4A8], cache=False)
    return model


def compile_blocks(model: nn.Module, _: Path) -> nn.Module:
    lowbit.compile_blocks(model, backend="eager")
    return model


def add_adapters(model: nn.Module, _: Path) -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).merge_and_unload()


CHANGES = {
    fuse: packed(), fuse_what_stays: packed("phi3"), load_gguf: packed(), from_pretrained: packed(), quantize: plain, train: plain,
    rotate: plain, smooth: plain, calibrate: plain, autoquant: plain, compile_blocks: packed(), add_adapters: packed(),
}  # fmt: skip
"""By change, what it is done to: a float model with torch's attention, or a quantized one with ours."""


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_models_of_other_threads_stay(change: Callable[[nn.Module, Path], nn.Module], tmp_path: Path) -> None:
    plain().save_pretrained(tmp_path / "float")
    gguf_files.write(tmp_path / "model.gguf", "llama", words=True)
    models = [CHANGES[change]() for _ in range(5)]  # here: random weights are of the generator that all threads share
    wanted = None if change is autoquant else logits(change(models.pop(), tmp_path), WORDS)
    fused = made("qwen3")
    lowbit.fuse(fused)
    served = [plain(), in_float("Llama", {}, "eager"), in_float("Llama", {}), fused]
    before = dict(callables_and_tables(PACKAGES))
    wrong: list[float] = []
    counts = [0] * len(served)
    over = threading.Event()

    def serve(at: int) -> None:
        model, first = served[at], logits(served[at], WORDS)
        while not over.is_set():
            difference = float((logits(model, WORDS) - first).abs().max())
            counts[at] += 1
            if difference:
                wrong.append(difference)

    threads = [threading.Thread(target=serve, args=(at,)) for at in range(len(served))]
    for thread in threads:
        thread.start()
    try:
        # transformers itself replaces PreTrainedModel.tie_weights while from_pretrained makes a model: one at a time.
        with ThreadPoolExecutor(1 if change is from_pretrained else 2) as pool:
            got: list[Tensor] = list(pool.map(lambda model: logits(change(model, tmp_path), WORDS), models))
        seen = list(counts)
        while any(now == then for now, then in zip(counts, seen, strict=True)):  # each once more behind the changes
            threads[0].join(0.01)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert wanted is None or all(each.equal(wanted) for each in got)  # autoquant chooses by the clock
    after = dict(callables_and_tables(PACKAGES))
    assert [name for name, value in before.items() if after.get(name) is not value] == []


def test_a_replaced_attention_function_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(callables_and_tables(PACKAGES))
    monkeypatch.setitem(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *_: None)
    after = dict(callables_and_tables(PACKAGES))
    assert before.keys() != after.keys()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_an_interrupt_leaves_only_pieces_that_were_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is interrupted at each of the calls that probes make, and says what it said."""
    wanted = logits(made(name), WORDS)
    calls, limit = 0, 0
    call = nn.Module.__call__

    def interrupted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == limit:
            raise KeyboardInterrupt
        return call(module, *args, **kwargs)

    while True:
        model = made(name)
        hooks = {key: len(module._forward_hooks) for key, module in model.named_modules()}
        calls, limit = 0, limit + 1
        try:
            with monkeypatch.context() as patch:
                patch.setattr(nn.Module, "__call__", interrupted)
                lowbit.fuse(model)
        except KeyboardInterrupt:
            torch.testing.assert_close(logits(model, WORDS), wanted, rtol=1e-4, atol=1e-4)
            assert model.config._attn_implementation == "lowbit"
            assert hooks == {key: len(module._forward_hooks) for key, module in model.named_modules()}
            assert all("forward" not in vars(module) for module in model.modules())
            continue
        break
    assert limit > 50


def test_hooks_of_a_model_do_not_see_the_probes() -> None:
    model, seen = made("llama"), []
    for module in (model.model.layers[0].self_attn, model.model.norm, model.model.embed_tokens, model.model):
        module.register_forward_hook(lambda module, args, out: seen.append(type(module).__name__))
    lowbit.fuse(model)
    assert seen == []
