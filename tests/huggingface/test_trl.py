# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers on quantized models, whose output head is packed: with LoRA, with packing of texts, of GGUF files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl_runs
from gguf_files import write
from tiny_models import save
from torch import Tensor, nn
from trl_runs import dpo, grpo, lora, losses, not_the_head, packing, quantized, rows, sft, tokenizer, with_float_head

import lowbit
from lowbit import QuantLinear
from lowbit.testing import ROUNDOFF

CONFIGS = {
    "int4": lowbit.int4_weight_only(32),
    "nf4": lowbit.nf4_weight_only(64),
    "w4a8": lowbit.int8_dynamic_activation_int4_weight(32),
}


def from_gguf(folder: Path, name: str) -> nn.Module:
    return lowbit.load_gguf(write(folder / f"{name}.gguf", name, "Q4_0", embedding="Q8_0", words=True))[0].train()


def made(name: str, folder: Path) -> nn.Module:
    return from_gguf(folder, name.removeprefix("gguf ")) if name.startswith("gguf") else quantized(CONFIGS[name])


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def rounding_of_a_log_probability(model: nn.Module) -> float:
    """The bound of the difference of a log-probability over a packed head, and over its decoded weight in torch.

    A logit errs by (k + 9) roundings of sum |h| |w| in float32, at most |h| |w|, where |h| is that of a norm's output.
    torch rounds weights and logits to the dtype of the model first. A log-probability has the errors of two logits, and
    both sides err."""
    head, norm = model.lm_head, model.base_model.norm
    largest = head.in_features**0.5 * norm.weight.abs().max() * head.dequantize().norm(dim=1).max()
    of_dtype = 2 * ROUNDOFF["bfloat16"] if model.dtype is torch.bfloat16 else 0.0
    return float(4 * ((head.in_features + 9) * 2.0**-24 + of_dtype) * largest)


def check_against_the_decoded_head(
    run: Callable[..., Any], model: nn.Module, folder: Path, autocast: bool = False, **options: Any
) -> None:
    """Losses and adapters are those of the same model whose head is an nn.Linear of the decoded weight, but for the order
    of sums: the op adds up other parts of the vocabulary than torch. The steps are SGD's, which are linear in gradients.

    No trainer multiplies a log-probability by more than 4: DPO has 0.1 for each of up to 26 tokens of a pair. The
    gradient by logits moves as the probabilities do, relatively; 16 is for the tokens whose gradients cancel."""
    assert type(model.lm_head) is QuantLinear
    packed, other = copy.deepcopy(model.lm_head.weight), with_float_head(model)
    bound = rounding_of_a_log_probability(copy.deepcopy(model).bfloat16() if autocast else model)
    ours = run(model, folder, optim="sgd", **options)  # which seeds what is drawn from here on
    before = {name: value.clone() for name, value in trained(ours.model).items()}
    got = losses(ours)
    wanted = run(other, folder, optim="sgd", **options)
    pairs = list(zip(got, losses(wanted), strict=True))
    print(f"{bound=} {pairs}")
    assert len(pairs) == 3 and all(abs(mine - theirs) <= 4 * bound for mine, theirs in pairs)
    mine, theirs = trained(ours.model), trained(wanted.model)
    assert mine and mine.keys() == theirs.keys()
    changes = [(mine[name] - theirs[name], theirs[name] - before[name]) for name in mine]
    difference, change = (float(torch.cat([pair[i].double().flatten() for pair in changes]).norm()) for i in (0, 1))
    assert change > 0 and difference <= 16 * bound * change, (difference, change)
    assert torch.equal(ours.accelerator.unwrap_model(ours.model).get_output_embeddings().weight, packed)


@pytest.mark.parametrize("run", [sft, packing, dpo], ids=["sft", "packing", "dpo"])
@pytest.mark.parametrize("name", [*CONFIGS, "gguf llama", "gguf tied"])
def test_losses_and_adapters_are_those_of_the_decoded_head(name: str, run: Callable[..., Any], tmp_path: Path) -> None:
    check_against_the_decoded_head(run, made(name, tmp_path), tmp_path, adapters=lora())


@pytest.mark.parametrize("run", [trl_runs.kto, grpo, trl_runs.rloo], ids=["kto", "grpo", "rloo"])
def test_other_trainers_too(run: Callable[..., Any], tmp_path: Path) -> None:
    check_against_the_decoded_head(run, quantized(CONFIGS["nf4"]), tmp_path, adapters=lora())


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_distillation_reads_both_heads(beta: float, tmp_path: Path) -> None:
    teacher = quantized(lowbit.int8_weight_only())
    assert type(teacher.lm_head) is QuantLinear
    student = quantized(CONFIGS["int4"])

    other = with_float_head(student)
    ours = trl_runs.distillation(student, tmp_path, lora(), teacher, beta)
    got = losses(ours)
    wanted = trl_runs.distillation(other, tmp_path, lora(), with_float_head(teacher), beta)
    assert len(got) == 3 and got == losses(wanted)
    mine, theirs = trained(ours.model), trained(wanted.model)
    assert mine and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_what_is_not_packed_trains_without_adapters_and_a_reference_is_packed_too(tmp_path: Path) -> None:
    check_against_the_decoded_head(sft, quantized(CONFIGS["int4"]), tmp_path)
    reference = quantized(CONFIGS["int4"])

    def run(model: nn.Module, folder: Path, **options: Any) -> Any:
        return dpo(model, folder, reference=copy.deepcopy(reference), **options)

    check_against_the_decoded_head(run, quantized(CONFIGS["int4"]), tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "autocast"])
def test_bfloat16_models_and_autocast(dtype: str, tmp_path: Path) -> None:
    autocast = dtype == "autocast"
    model = quantized(CONFIGS["nf4"]) if autocast else quantized(CONFIGS["nf4"]).to(torch.bfloat16)

    def run(model: nn.Module, folder: Path, **options: Any) -> Any:
        if type(model.lm_head) is nn.Linear:
            model.lm_head.to(model.dtype)
        return sft(model, folder, bf16=autocast, **options)

    check_against_the_decoded_head(run, model, tmp_path, autocast, adapters=lora())


def test_a_model_is_named_by_its_folder_and_a_run_is_resumed(tmp_path: Path) -> None:
    folder = save("tied", tmp_path)
    tokenizer().save_pretrained(folder)
    config = lowbit.LowbitConfig(CONFIGS["nf4"])
    of_8_bits = {"optim": "adamw_8bit", "optim_args": "min_8bit_size=1"}
    options = {"save_strategy": "steps", "save_steps": 2, "quantization_config": config, **of_8_bits}
    whole = sft(str(folder), tmp_path / "whole", lora(), **options)
    assert type(whole.model.get_output_embeddings()) is QuantLinear
    assert whole.create_optimizer().__class__ is lowbit.optim.AdamW8bit
    wanted = losses(whole)
    resumed = sft(str(folder), tmp_path / "whole", lora(), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert [float(entry["loss"]) for entry in resumed.state.log_history if "loss" in entry] == wanted
    pairs = trained(whole.model), trained(resumed.model)
    assert pairs[0] and all(torch.equal(pairs[0][name], pairs[1][name]) for name in pairs[0])


def head_errors(model: nn.Module, weight: Tensor) -> tuple[float, Tensor]:
    """The bound of the difference of a logit, over all texts; and the head's differences of weights, checked against
    the bound of its format: half a step, and what 11 bits of a scale leave of the largest code, 127."""
    head = model.lm_head
    _, scale, _ = head.unpack()
    step = scale.repeat_interleave(head.in_features // scale.shape[1], 1)
    difference = (head.dequantize() - weight).abs()
    bound = step * (0.5 + 127 * 2.0**-11)
    assert (difference <= bound).all()
    words = tokenizer()
    largest = 0.0
    for row in [*rows("text"), *rows("pairs")]:
        texts = [row["text"]] if "text" in row else [row["prompt"] + row["chosen"], row["prompt"] + row["rejected"]]
        for text in texts:
            with torch.no_grad():
                hidden = model.model(torch.tensor([words(text)["input_ids"] + [words.eos_token_id]])).last_hidden_state
            largest = max(largest, float((hidden[0].abs() @ bound.T).max()))
    return largest


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_are_those_of_a_float_head_within_the_bound_of_the_packed_one(name: str, tmp_path: Path) -> None:
    """|log p - log p'| <= |z_t - z_t'| + max_v |z_v - z_v'| <= 2 b, as a logsumexp moves no further than the
    largest of its terms; and |z_v - z_v'| <= sum_j |h_j| |w_vj - w'_vj| <= b. The loss of SFT is a mean of these.
    That of DPO is -logsigmoid(beta * x), of slope beta at most in x, which sums log p of both answers of the model
    and the reference."""
    plain = quantized(CONFIGS[name], filter_fn=not_the_head)
    assert type(plain.lm_head) is nn.Linear
    b = head_errors(quantized(CONFIGS[name]), plain.lm_head.weight.detach())
    tokens = sum(len(tokenizer()(rows("pairs")[0][key])["input_ids"]) + 1 for key in ("chosen", "rejected"))
    for run, bound in ((sft, 2 * b), (dpo, 0.1 * 2 * tokens * 2 * b)):
        float_head = losses(run(copy.deepcopy(plain), tmp_path, lora()))[0]
        packed_head = losses(run(quantized(CONFIGS[name]), tmp_path, lora()))[0]
        print(f"{run.__name__}: {float_head} and {packed_head}, bound {bound}")
        assert 0 < abs(packed_head - float_head) <= bound < 0.2


def test_a_head_that_is_trained_with_rounding_is_read_rounded(tmp_path: Path) -> None:
    model = quantized(lowbit.training.QATConfig(lowbit.int4_weight_only(32)))
    run = sft(model, tmp_path)
    batch = next(iter(run.get_train_dataloader()))
    before = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        got = model(**batch, fused_lm_head=True).loss
        wanted = model(**batch).loss  # activations are float
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0)
    losses(run)
    assert not torch.equal(model.lm_head.weight, before)


def test_a_reward_model_with_a_float_score_trains(tmp_path: Path) -> None:
    assert len(losses(trl_runs.reward(CONFIGS["nf4"], tmp_path))) == 3


def test_other_models_and_trl_itself_stay_as_they_are(tmp_path: Path) -> None:
    from trl.trainer import distillation_trainer, utils

    tables = [dict(vars(module)) for module in (utils, distillation_trainer)]
    plain = quantized(CONFIGS["int4"], filter_fn=not_the_head)
    sft(plain, tmp_path)
    assert plain.forward.__func__.__globals__ is vars(utils)
    model = quantized(CONFIGS["int4"])
    run = sft(model, tmp_path)
    assert model.forward.__func__.__globals__ is not vars(utils)
    losses(run)
    assert [dict(vars(module)) for module in (utils, distillation_trainer)] == tables


def test_generation_and_a_plain_call_are_those_of_before(tmp_path: Path) -> None:
    model = quantized(CONFIGS["int4"])
    ids = torch.arange(12).view(2, 6)
    options = dict(pad_token_id=0, eos_token_id=1, max_new_tokens=4, do_sample=False)
    options["attention_mask"] = torch.ones_like(ids)
    with torch.no_grad():
        wanted = model.eval()(ids, labels=ids)
        words = model.generate(ids, **options)
        sft(model, tmp_path)
        got = model.eval()(ids, labels=ids)
        assert torch.equal(model.generate(ids, **options), words)
    assert torch.equal(got.logits, wanted.logits) and torch.equal(got.loss, wanted.loss)


def test_heads_that_cannot_be_read_are_refused_by_name(tmp_path: Path, subtests: pytest.Subtests) -> None:
    blocks = quantized(CONFIGS["int4"], filter_fn=not_the_head, vocab_size=96)
    lowbit.sparsify_(blocks, lowbit.block_sparse_weight(16), filter_fn=lambda module, name: name == "lm_head")
    trained_int8 = quantized(lowbit.training.Int8WeightOnlyQuantizedTrainingConfig())
    pruned = quantized(CONFIGS["int4"], filter_fn=not_the_head, vocab_size=96)
    kind = lowbit.training.SemiSparseLinear
    lowbit.training.swap_linear_with_semi_sparse_linear(pruned, {"lm_head": kind})
    heads = {"BlockSparseLinear": blocks, "Int8WeightLinear": trained_int8, "SemiSparseLinear": pruned}
    for name, model in heads.items():
        for function, run in (("add_fused_lm_head", sft), ("DistillationTrainer", distill)):
            with subtests.test(name, function=function), pytest.raises(ValueError, match=rf"{function}: .*got {name}"):
                losses(run(copy.deepcopy(model), tmp_path))
    with pytest.raises(ValueError, match="cast_lm_head_to_fp32 must be False for an output head that lowbit made"):
        grpo(quantized(CONFIGS["int4"]), tmp_path, lora(), cast_lm_head_to_fp32=True)


def test_a_copy_of_a_model_that_a_trainer_had_is_refused(tmp_path: Path) -> None:
    """Its forward is the original's, which would read the copy's head in the original's format."""
    model = sft(quantized(CONFIGS["int4"]), tmp_path, lora()).model.unload().eval()
    ids, twin = torch.tensor([[3, 5, 7, 9]]), copy.deepcopy(model)
    lowbit.dequantize_(twin)
    lowbit.quantize_(twin, lowbit.fp4_weight_only(32))
    model(ids, labels=ids, fused_lm_head=True)
    with pytest.raises(ValueError, match="the output head must be that of the model that the trainer was given"):
        twin(ids, labels=ids, fused_lm_head=True)


def test_a_trainer_with_a_loop_of_its_own_refuses_a_packed_head() -> None:
    from trl.experimental.async_distillation import AsyncDistillationTrainer as Trainer

    with pytest.raises(ValueError, match="AsyncDistillationTrainer: the output head must be float, got int8 g32"):
        Trainer._compute_loss(None, quantized(CONFIGS["int4"]), {})
    with pytest.raises(KeyError, match="attention_mask"):  # passed through
        Trainer._compute_loss(None, quantized(CONFIGS["int4"], filter_fn=not_the_head), {})


def distill(model: nn.Module, folder: Path) -> Any:
    return trl_runs.distillation(model, folder, None, quantized(CONFIGS["int4"], model.config.vocab_size))


def test_products_in_int8_are_float_in_the_head(tmp_path: Path) -> None:
    model = quantized(lowbit.training.Int8MixedPrecisionTrainingConfig())
    assert len(losses(sft(model, tmp_path))) == 3
    assert model.lm_head.trained_as == "int8 products"


def test_trl_that_was_there_before_is_joined_and_another_one_is_told(python: Callable[..., str]) -> None:
    code = """
import sys
from trl import SFTTrainer, DistillationTrainer
assert "lowbit" not in sys.modules
import lowbit
from trl.trainer import utils, sft_trainer
add = sft_trainer.add_fused_lm_head
compute = DistillationTrainer._compute_loss
print(add is utils.add_fused_lm_head, add._before_lowbit.__module__, hasattr(compute, "_before_lowbit"))
del utils.add_fused_lm_head
import importlib, lowbit.huggingface.trl
try:
    importlib.reload(lowbit.huggingface.trl)
except ImportError as error:
    print(error)
"""
    lines = python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0", LOWBIT_BITSANDBYTES="0").splitlines()
    assert lines[0] == "True trl.trainer.utils True"
    assert "lowbit.huggingface.trl knows the fused head of trl 1.16, got trl " in lines[1]
