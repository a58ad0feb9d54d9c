# SPDX-License-Identifier: Apache-2.0
"""What the fused recurrent layers of transformers (gated delta nets, Mamba-1 and 2, short convolutions) share: the trial
on random input, the convolution with its state in the cache, and the recurrent state in the cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lowbit.models.croppable_states import CroppableStates, Recurrence
from lowbit.models.hybrid_cache import GrowingHybridLayer
from lowbit.ops.causal_conv1d import causal_conv1d
from lowbit.ops.fakes import FLOATS
from lowbit.quant.fused import hooked, is_eager, probe_of

try:
    from transformers.cache_utils import LinearAttentionLayer
except ImportError:  # the first versions of transformers 5 have no cache for them, and none of these models
    LinearAttentionLayer = None

SILU = ("silu", "swish")
TAPS = range(2, 9)
"""The numbers of taps that `causal_conv1d` takes."""
STATE_DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes of the states of ops."""
_TOLERANCE = 1e-4  # relative to the largest value: the same float32 sums in another order
_PACKED = ("cu_seq_lens_q", "cu_seqlens")
"""Names under which a layer gets the boundaries of packed sequences."""


def boundaries_of(given: dict[str, Any]) -> Tensor | None:
    """Return the boundaries of packed sequences among the arguments of a call."""
    return next((given[name] for name in _PACKED if given.get(name) is not None), None)


def is_served(x: Tensor, cache: Any, index: int, given: dict[str, Any]) -> bool:
    """Return whether lowbit computes this call, with its gradients where they are recorded. Left to transformers are the
    calls that it refuses in words (sequences that are named token by token), caches that keep past states for assisted
    decoding, and gradients of a call that changes a state in place."""
    return (
        x.dtype in FLOATS
        and is_eager(x)
        and (given.get("seq_idx") is None or boundaries_of(given) is not None)
        and (cache is None or croppable(cache, index) is not None or not cache.is_recording_past(index))
        and (cache is None or not torch.is_grad_enabled() or cache.get_conv_state(index) is None)
    )


def croppable(cache: Any, index: int) -> CroppableStates | None:
    """Return the layer of a cache if its states can be cropped, else None."""
    layer = None if cache is None else cache.layers[index]
    return layer if isinstance(layer, CroppableStates) else None


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x with zeros for padded tokens: they add nothing to a state."""
    return x if mask is None else (x * mask[:, :, None]).to(x.dtype)


def refuse_packed_with_cache(layer: str, boundaries: Tensor | None, cache: Any) -> None:
    """Raise if packed sequences come with a cache."""
    if boundaries is not None and cache is not None:
        raise ValueError(
            f"{layer}: packed sequences (cu_seq_lens_q) must come without a cache, which has one state per row: pass "
            "use_cache=False"
        )


def convolved(
    conv: nn.Module, x: Tensor, cache: Any, index: int, boundaries: Tensor | None, activation: str | None = "silu"
) -> Tensor:
    """Return the causal convolution of x ``[B, T, C]``. It goes on from the state in the cache, which it renews."""
    weight, bias = conv.weight.squeeze(1), conv.bias
    if cache is None:
        return causal_conv1d(x, weight, bias, activation=activation, cu_seqlens=boundaries)[0]
    if (layer := croppable(cache, index)) is not None:
        return layer.convolve(_convolution(weight, bias, activation), x, weight.shape[-1])
    size, state = weight.shape[-1], cache.get_conv_state(index)
    before = x.new_zeros(len(x), x.shape[-1], size) if state is None else state.to(x.dtype)
    y, after = causal_conv1d(x, weight, bias, before, activation=activation)
    if state is None:
        cache.update_conv_state(after, index, conv_kernel_size=size)
    else:
        state.copy_(after)
    return y


def _convolution(weight: Tensor, bias: Tensor | None, activation: str | None) -> Recurrence:
    """Return a convolution as `CroppableStates` calls it."""
    weight, bias = weight.detach(), None if bias is None else bias.detach()

    def convolve(tensors: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        (x,) = tensors
        before = x.new_zeros(len(x), x.shape[-1], weight.shape[-1]) if state is None else state.to(x.dtype)
        return causal_conv1d(x, weight, bias, before, activation=activation)

    return convolve


def scanned(
    scan: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, ...],
    given: dict[str, Any],
    cache: Any,
    index: int,
) -> Tensor:
    """Return y of `ssd` or `selective_scan`, which goes on from the state in the cache and changes it in place."""
    if (layer := croppable(cache, index)) is not None:
        timed = [tensor.dim() > 2 for tensor in tensors]  # [B, T, ...]; others are the same for all tokens

        def go_on(parts: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
            rest = iter(parts)
            of_part = [next(rest) if moves else tensor for moves, tensor in zip(timed, tensors, strict=True)]
            return scan(*of_part, **given, state=state)

        return layer.recur(go_on, [tensor for moves, tensor in zip(timed, tensors, strict=True) if moves])
    held = None if cache is None else cache.get_recurrent_state(index)
    state = served_state(held)
    if state is not None and state is held and state.is_contiguous():
        return scan(*tensors, **given, state=state, in_place=True)[0]
    y, state = scan(*tensors, **given, state=state)
    if cache is not None:
        cache.update_recurrent_state(state, index)
    return y


def served_state(state: Tensor | None) -> Tensor | None:
    """Return a state in a dtype that the ops take: its own, or float32."""
    return state if state is None or state.dtype in STATE_DTYPES else state.float()


def keep(cache: Any, index: int, state: Tensor) -> None:
    """Store the new recurrent state in the cache. transformers copies it, for CUDA graphs; a copy costs as much as the
    token."""
    layer = cache.layers[index]
    held = layer.recurrent_states[0] if type(layer) in (LinearAttentionLayer, GrowingHybridLayer) else None
    if held is None or held.dtype is not state.dtype or held.is_inference() != state.is_inference():
        cache.update_recurrent_state(state, index)
    else:
        layer.recurrent_states[0] = state


def refusal_of(module: Any, conv: str, activation: str | None, children: Collection[str]) -> str:
    """Return why a layer with this convolution cannot be fused, whatever else it has, or an empty string."""
    if LinearAttentionLayer is None:
        return "this version of transformers has no cache of its states"
    if refusal := refusal_of_convolution(module._modules[conv], activation):
        return refusal
    if hook := hooked(module, children):
        return f"hooks on {hook}"
    if not all(tensor.is_cpu for tensor in (*module.parameters(), *module.buffers())):
        return "it is not on the CPU, where the kernel rows are"
    return ""


def refusal_of_convolution(conv: Any, activation: str | None) -> str:
    """Return why `causal_conv1d` cannot compute a convolution and the activation behind it, or an empty string."""
    if not isinstance(conv, nn.Conv1d) or conv.weight.dim() != 3 or conv.weight.shape[1] != 1:
        return f"its convolution is {type(conv).__name__}, not one of each channel with itself"
    if conv.weight.shape[-1] not in TAPS:
        return f"its convolution has {conv.weight.shape[-1]} taps, lowbit's has 2 to 8"
    if activation not in (None, *SILU):
        return f"the activation of its convolution is {activation}, not silu"
    return ""


class Reader(nn.Module):
    """A small linear layer in the place of a large one, for a trial."""

    def __init__(self, layer: Any, generator: torch.Generator) -> None:
        super().__init__()
        self.matrix = torch.randn(min(layer.in_features, 8), layer.out_features, generator=generator, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        return x[..., : len(self.matrix)] @ self.matrix


def randomized(owner: nn.Module, generator: torch.Generator) -> nn.Module:
    """Return the module, a probe, with random float32 parameters of its own."""
    for name, value in owner._parameters.items():
        if value is not None:
            owner._parameters[name] = nn.Parameter(torch.rand(value.shape, generator=generator, device="cpu") - 0.5)
    return owner


def probe_with_readers(
    module: Any, readers: list[str], small: list[str], out: str, generator: torch.Generator
) -> nn.Module:
    """Return a copy of the module with random float32 weights for trial calls, whose output projection returns its
    input. ``small`` are the children that are copied, such as convolution and norm."""
    children: dict[str, nn.Module] = {name: Reader(module._modules[name], generator) for name in readers}
    children |= {name: randomized(probe_of(module._modules[name]), generator) for name in small}
    probe = randomized(probe_of(module, **children, **{out: nn.Identity()}), generator)
    probe.layer_idx = 0
    return probe


@torch.no_grad()
def results_of(
    probe: Any, hidden: int, name: str = "cache_params", lengths: tuple[int, ...] = (4, 4, 1)
) -> list[Tensor]:
    """Return what the probe makes of prompts and a token, and the states that it leaves; nothing if it has another
    signature. ``name`` is that of the argument for the cache, ``lengths`` are the numbers of tokens of calls with it."""
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, sum(lengths), hidden, generator=generator, device="cpu")
    seen = torch.ones(2, lengths[0], dtype=torch.long, device="cpu")
    seen[0, :2] = 0
    cache = Cache(layers=[LinearAttentionLayer()])
    first, *others = x.split(lengths, dim=1)
    try:
        results = [probe(first, **{name: cache}, attention_mask=seen)]
        results += [probe(part, **{name: cache}) for part in others]
        results += [probe(first, attention_mask=seen)]
        states: list[Callable[[int], Tensor | None]] = [cache.get_conv_state, cache.get_recurrent_state]
        return [*results, *(state for read in states if (state := read(0)) is not None)]
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError, IndexError):
        return []


def agree(wanted: list[Tensor], got: list[Tensor]) -> bool:
    """Return whether results of two probes are the same up to the order of their sums."""
    return len(got) == len(wanted) > 0 and all(
        isinstance(one, Tensor) and one.shape == other.shape
        and bool((one - other).abs().max() <= _TOLERANCE * other.abs().max())
        for one, other in zip(got, wanted, strict=True)
    )  # fmt: skip


def are_alike(module: nn.Module, noted: Any, other: Any, conv: str) -> bool:
    """Whether a module differs from one that is fused in nothing but weights."""
    of_other = other.facts["noted"]
    return (
        other.unfused is type(module)
        and of_other.names == noted.names and of_other.hold(module)
        and [*map(type, module._modules.values())] == [*map(type, other._modules.values())]
        and module._modules[conv].weight.shape == other._modules[conv].weight.shape
    )  # fmt: skip
