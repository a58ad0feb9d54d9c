# SPDX-License-Identifier: Apache-2.0
"""QLoRA in the Trainer of transformers: names of optimizers served by ours, and a resumed run that is the uninterrupted one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")
from qlora import adapted, arguments, data, packed, same, trained  # noqa: E402
from transformers import Trainer, TrainerCallback  # noqa: E402

import lowbit  # noqa: E402
from lowbit import optim  # noqa: E402

NAMES: dict[str, tuple[type, dict[str, Any]]] = {
    "adamw_8bit": (optim.AdamW8bit, {"eps": 1e-6}),
    "adamw_bnb_8bit": (optim.AdamW8bit, {"eps": 1e-6}),
    "adamw_torch_8bit": (optim.AdamW8bit, {"eps": 1e-6}),
    "adamw_torch_4bit": (optim.AdamW4bit, {"eps": 1e-6}),
    "lion_8bit": (optim.Lion8bit, {}),
    "lion_32bit": (optim.Lion8bit, {"optim_bits": 32}),
    "paged_adamw_8bit": (optim.AdamW8bit, {"eps": 1e-6}),
    "paged_adamw_32bit": (optim.AdamW, {"eps": 1e-6}),
    "paged_lion_8bit": (optim.Lion8bit, {}),
    "paged_lion_32bit": (optim.Lion8bit, {"optim_bits": 32}),
}


def trainer(folder: Path, model: torch.nn.Module, callbacks: Any = None, **options: Any) -> Trainer:
    given = arguments(folder, **options)
    return Trainer(
        model,
        given,
        train_dataset=data(),
        callbacks=callbacks,
        optimizer_cls_and_kwargs=lowbit.trainer_optimizer(given),
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_name_trains_as_the_class_that_it_stands_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # no other package is asked
    monkeypatch.setitem(sys.modules, "torchao", None)
    options = {
        "max_steps": 2,
        "optim": name,
        "adam_beta1": 0.8,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-6,
        "weight_decay": 0.1,
    }
    named = trainer(tmp_path, adapted(), **options)
    named.train()
    cls, own = NAMES[name]
    given = (cls, {"lr": 1e-2, "betas": (0.8, 0.95), "min_8bit_size": 1, **own})
    plain = Trainer(adapted(), arguments(tmp_path, **options), train_dataset=data(), optimizer_cls_and_kwargs=given)
    plain.train()
    assert same(trained(named.model), trained(plain.model))
    made = named.optimizer.optimizer
    assert isinstance(made, optim.CPUOffloadOptimizer if name.startswith("paged") else cls)
    assert type(getattr(made, "base_optimizer", made)) is cls
    assert same(dict(enumerate(made.state.values())), dict(enumerate(plain.optimizer.optimizer.state.values())))


@pytest.mark.parametrize("name, classes", [("muon", (optim.Muon, optim.AdamW)), ("muon_8bit", (optim.Muon8bit, optim.AdamW8bit))])
def test_muon_trains_matrices_and_adamw_the_rest(name: str, classes: tuple[type, type], tmp_path: Path) -> None:
    options = {"max_steps": 4, "weight_decay": 0.1, "adam_beta2": 0.95, "optim_args": "min_8bit_size=1"}
    given = arguments(tmp_path / name, **options)
    model = adapted()
    model.get_output_embeddings().requires_grad_(model.get_output_embeddings().weight.is_floating_point())
    norm = next(module for module in model.modules() if "RMSNorm" in type(module).__name__)
    norm.weight.requires_grad_()
    named = Trainer(model, given, train_dataset=data(), optimizer_cls_and_kwargs=lowbit.trainer_optimizer(given, name))
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    named.train()
    made = named.optimizer.optimizer
    assert isinstance(made, optim.ChainedOptimizer) and tuple(map(type, made.optimizers)) == classes
    muon, adamw = made.optimizers
    assert muon.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw" and muon.param_groups[0]["weight_decay"] == 0.1
    assert muon.param_groups[0]["min_8bit_size"] == 1
    assert all("lora_" in key for key, p in model.named_parameters() for q in muon.param_groups[0]["params"] if p is q)
    assert adamw.param_groups[0]["weight_decay"] == 0.0 and adamw.param_groups[0]["betas"] == (0.9, 0.95)
    assert any(p is norm.weight for p in adamw.param_groups[0]["params"])
    moved = [not torch.equal(p, old) for p, old in zip((p for p in model.parameters() if p.requires_grad), before, strict=True)]
    assert all(moved)


def test_a_resumed_run_of_muon_is_the_uninterrupted_one(tmp_path: Path) -> None:
    runs = []
    for stop in (None, 2):
        torch.manual_seed(0)
        options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim_args": "min_8bit_size=1"}
        given = arguments(tmp_path / str(stop), **options)
        make = lowbit.trainer_optimizer(given, "muon_8bit")
        run = Trainer(adapted(), given, train_dataset=data(), optimizer_cls_and_kwargs=make)
        run.train(resume_from_checkpoint=None if stop is None else str(tmp_path / "None" / "checkpoint-2"))
        runs.append(run)
    assert same(*(trained(run.model) for run in runs))


def test_what_is_not_served_is_refused_by_name(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for name in ("adamw_torch", "adamw_torch_fused", "ademamix_8bit", "rmsprop_bnb_8bit", "sgd"):
        with subtests.test(name), pytest.raises(ValueError, match=rf"trainer_optimizer: optim must be one of adamw_8bit, .*; got '{name}'"):
            lowbit.trainer_optimizer(arguments(tmp_path, optim=name))
    for wrong, said in {
        "betas=3": "optim_args must be of block_size, min_8bit_size, bf16_stochastic_round, master; got 'betas=3'",
        "minimal_size=3": "optim_args must be of .*; got 'minimal_size=3'",
        "block_size=1.5": "block_size of optim_args must be a whole number, got '1.5'",
        "bf16_stochastic_round=maybe": "bf16_stochastic_round of optim_args must be true or false, got 'maybe'",
    }.items():
        with subtests.test(wrong), pytest.raises(ValueError, match=f"trainer_optimizer: {said}"):
            lowbit.trainer_optimizer(arguments(tmp_path, optim_args=wrong))
    with pytest.raises(ValueError, match="optim must be one of .*, muon, muon_8bit; got 'moun'"):
        lowbit.trainer_optimizer(arguments(tmp_path), "moun")
    with pytest.raises(TypeError, match="arguments must be a TrainingArguments, got dict without optim"):
        lowbit.trainer_optimizer({"optim": "adamw_8bit"})


def test_optim_args_are_read(tmp_path: Path) -> None:
    for name in ("adamw_8bit", "paged_adamw_8bit"):
        given = arguments(tmp_path, optim=name, optim_args="master=bf16+8")
        assert lowbit.trainer_optimizer(given)[1]["master"] == "bf16+8"
    text = "block_size=64, bf16_stochastic_round=True, minimal_size=0, offload_gradients=no"
    cls, options = lowbit.trainer_optimizer(arguments(tmp_path, optim="paged_adamw_8bit", optim_args=text))
    assert cls is optim.CPUOffloadOptimizer and options.pop("optimizer_class") is optim.AdamW8bit
    assert options.pop("lr") == 1e-2 and options.pop("betas") == (0.9, 0.999) and options.pop("eps") == 1e-8
    assert options == {"block_size": 64, "bf16_stochastic_round": True, "minimal_size": 0, "offload_gradients": False}
    assert (
        "block_size" not in lowbit.trainer_optimizer(arguments(tmp_path, optim_args=None))[1]
    )  # 256, or 128 of 4 bits


class LastState(TrainerCallback):
    """The state at the end of a run, beside its adapters: the generators, which give dropout and the order of texts."""

    def on_train_end(self, arguments: Any, state: Any, control: Any, **others: Any) -> None:
        scheduler = dict(others["lr_scheduler"].state_dict())
        self.found = {"rng": torch.get_rng_state(), "scheduler": scheduler, "step": state.global_step}


def states(run: Trainer) -> dict[int, Any]:
    return run.optimizer.state_dict()["state"]


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit", "adamw_torch_4bit", "lion_8bit"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(name: str, tmp_path: Path) -> None:
    options = {"optim": name, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    ends = [LastState(), LastState()]
    whole = trainer(tmp_path, adapted(), [ends[0]], **options)
    whole.train()
    base = packed(whole.model)
    torch.manual_seed(99)
    resumed = trainer(tmp_path, adapted(seed=5), [ends[1]], **options)  # other adapters, which the checkpoint replaces
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert ends[1].found["step"] == 6 and same(ends[0].found, ends[1].found)
    assert same(trained(whole.model), trained(resumed.model)) and same(states(whole), states(resumed))
    assert same(base, packed(resumed.model)) and same(base, packed(adapted()))  # the base is as it was


def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path: Path, subtests: pytest.Subtests) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    run = trainer(tmp_path / "a", adapted(), **options)
    run.train()
    trainer(tmp_path / "rank", adapted(rank=4), **options).train()
    trainer(tmp_path / "lion", adapted(), **options | {"optim": "lion_8bit"}).train()
    saved = tmp_path / "a" / "checkpoint-2"
    for other, said in (
        ("rank", r"AdamW8bit.load_state_dict: parameter 0: exp_avg must have shape \[8, 64\], got \[4, 64\]"),
        ("lion", r"AdamW8bit.load_state_dict: param group 0: it must have eps, amsgrad, got"),
    ):
        with subtests.test(other):
            mixed = tmp_path / f"mixed-{other}" / "checkpoint-2"
            shutil.copytree(saved, mixed)
            shutil.copy(tmp_path / other / "checkpoint-2" / "optimizer.pt", mixed)
            resumed = trainer(tmp_path / "b", adapted(), **options | {"max_steps": 4})
            resumed.create_optimizer()
            with pytest.raises(ValueError, match=said):
                resumed.train(resume_from_checkpoint=str(mixed))
            assert all(float(state["step"]) == 0 for state in resumed.optimizer.state.values())
