"""What the target's and the drafter's layers share: rotary tables, attention, MLP.

A layer never sees a cache. It hands the projection of its rows to a `Memory`, which keeps what it
needs and returns what the queries see: paged K/V while decoding, a plain causal matrix while
training, per-slot recurrent state for hybrid targets one day.

Projections that read the same input are one matrix here (q, k, v; gate, up). `Part` says which
rows of which parameter a tensor of the checkpoint is, for loading, saving and the optimizer.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanodflash import ops
from nanodflash.models.config import RopeConfig, TransformerConfig


class Heads(NamedTuple):
    """A layer's fused projection, and what makes queries, keys and values of it."""

    qkv: Tensor  # [..., Hq + 2 Hkv, D]
    q_norm: Tensor  # [D]
    k_norm: Tensor  # [D]
    eps: float
    rotary: ops.Rotary
    num_kv: int

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [..., Hq, D], k and v [..., Hkv, D], normed and rotated: for a memory without pages."""
        return ops.split_heads(*self)


class Memory(Protocol):
    """The sequence memory of the rows of one forward, for every layer of one model."""

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """Keep keys and values and return what the queries see, [..., Hq, D]."""
        ...


class Writer(Protocol):
    """A sequence memory that takes rows without a query: what the drafter injects into."""

    def inject(self, kv: Tensor, k_norms: Tensor, eps: float, rotary: ops.Rotary) -> None:
        """Keep K and V of all layers: kv [..., L, 2 Hkv, D] as projected, k_norms [L, D]."""
        ...


class Part(NamedTuple):
    """Rows `start:stop` of a parameter: what one tensor of the checkpoint is."""

    parameter: nn.Parameter
    start: int
    stop: int

    def view(self, tensor: Tensor | None = None) -> Tensor:
        """These rows of the parameter, or of `tensor` of the same shape (a gradient)."""
        return (self.parameter.detach() if tensor is None else tensor)[self.start : self.stop]


def whole(parameter: nn.Parameter) -> Part:
    """A `Part` that is all of the parameter."""
    return Part(parameter, 0, parameter.shape[0])


class Layer(nn.Module):
    """One pre-norm block: attention with q/k norms, then SwiGLU. Qwen3's, and DFlash's block side.

    Source: checkpoint keys `layers.{i}.*` (dflash.md 1.1, 1.5).
    """

    def __init__(self, config: TransformerConfig, index: int) -> None:
        super().__init__()
        self.index, self.eps = index, config.rms_norm_eps
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.width = config.head_dim, config.intermediate_size
        hidden, q_rows = config.hidden_size, self.num_heads * self.head_dim
        self.kv_rows = self.num_kv_heads * self.head_dim
        self.input_layernorm = nn.Parameter(torch.ones(hidden))
        self.post_attention_layernorm = nn.Parameter(torch.ones(hidden))
        self.q_norm = nn.Parameter(torch.ones(self.head_dim))
        self.k_norm = nn.Parameter(torch.ones(self.head_dim))
        self.qkv_proj = nn.Parameter(torch.empty(q_rows + 2 * self.kv_rows, hidden))
        self.o_proj = nn.Parameter(torch.empty(hidden, q_rows))
        self.gate_up_proj = nn.Parameter(torch.empty(2 * self.width, hidden))
        self.down_proj = nn.Parameter(torch.empty(hidden, self.width))

    def parts(self) -> dict[str, Part]:
        """Checkpoint name below `layers.{i}.` -> the rows that hold it."""
        q, kv, w = self.num_heads * self.head_dim, self.kv_rows, self.width
        return {
            "input_layernorm.weight": whole(self.input_layernorm),
            "post_attention_layernorm.weight": whole(self.post_attention_layernorm),
            "self_attn.q_norm.weight": whole(self.q_norm),
            "self_attn.k_norm.weight": whole(self.k_norm),
            "self_attn.q_proj.weight": Part(self.qkv_proj, 0, q),
            "self_attn.k_proj.weight": Part(self.qkv_proj, q, q + kv),
            "self_attn.v_proj.weight": Part(self.qkv_proj, q + kv, q + 2 * kv),
            "self_attn.o_proj.weight": whole(self.o_proj),
            "mlp.gate_proj.weight": Part(self.gate_up_proj, 0, w),
            "mlp.up_proj.weight": Part(self.gate_up_proj, w, 2 * w),
            "mlp.down_proj.weight": whole(self.down_proj),
        }

    def forward(
        self, h: Tensor, x: Tensor, rotary: ops.Rotary, memory: Memory, table: ops.Ops
    ) -> tuple[Tensor, Tensor]:
        """One block over the residual stream.

        Args:
            h: [..., C], the residual stream.  x: the same after `input_layernorm`.
        Returns:
            Two tensors [..., C] whose sum is the stream after this block: whoever norms it next
            adds them in the same pass.
        """
        qkv = F.linear(x, self.qkv_proj).unflatten(-1, (-1, self.head_dim))
        heads = Heads(qkv, self.q_norm, self.k_norm, self.eps, rotary, self.num_kv_heads)
        delta = F.linear(memory.attend(self.index, heads).flatten(-2), self.o_proj)
        h, x = table.add_rms_norm(h, delta, self.post_attention_layernorm, self.eps)
        return h, F.linear(table.silu_mul(F.linear(x, self.gate_up_proj)), self.down_proj)


def run_layers(
    layers: nn.ModuleList,
    norm: Tensor,
    h: Tensor,
    rotary: ops.Rotary,
    memory: Memory,
    table: ops.Ops,
    taps: Sequence[int] = (),
) -> tuple[Tensor, list[Tensor]]:
    """All layers and the final norm.

    Args:
        norm: [C], the final one.  h: [..., C], the residual stream.
        taps: layers whose output (the stream after them, not normed) is recorded.
    Returns:
        [..., C], and the taps in listed order.
    """
    norms = [*(layer.input_layernorm for layer in layers), norm]
    eps: Any = layers[0].eps
    x, tapped = table.rms_norm(h, norms[0], eps), {}
    for i, layer in enumerate(layers):
        h, delta = layer(h, x, rotary, memory, table)
        h, x = table.add_rms_norm(h, delta, norms[i + 1], eps)
        if i in taps:
            tapped[i] = h
    return x, [tapped[i] for i in taps]


def layer_parts(layers: Iterable[nn.Module], prefix: str = "") -> dict[str, Part]:
    """The parts of all layers by their checkpoint names, `{prefix}layers.{i}.*`."""
    named: dict[str, Part] = {}
    for i, layer in enumerate(layers):
        assert isinstance(layer, Layer)
        named |= {f"{prefix}layers.{i}.{key}": part for key, part in layer.parts().items()}
    return named


class Rotary(nn.Module):
    """cos and sin of every position below `length`, gathered by position.

    Tables are fp32 (fp64 for an fp64 model) when made, then rounded to the model's dtype, as the
    checkpoints were trained. Positions past the table are the caller's to clamp.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TransformerConfig, length: int, like: Tensor) -> None:
        super().__init__()
        self.length = length
        wide = torch.promote_types(like.dtype, torch.float32)
        inv_freq, scale = inverse_frequencies(config)
        positions = torch.arange(length, dtype=wide)
        angles = torch.outer(positions, inv_freq.to(wide)).repeat(1, 2)[:, None]
        sin = angles.sin() * scale
        sin[..., : config.head_dim // 2].neg_()  # `ops.norm_rope` rolls halves
        self.register_buffer("cos", (angles.cos() * scale).to(like), persistent=False)
        self.register_buffer("sin", sin.to(like), persistent=False)

    def forward(self, positions: Tensor) -> ops.Rotary:
        """cos and sin [..., 1, D] for `positions` [...] int64."""
        return ops.Rotary(self.cos[positions], self.sin[positions])


def inverse_frequencies(config: TransformerConfig) -> tuple[Tensor, float]:
    """Frequencies [D/2] fp64 and the factor on cos and sin.

    "dynamic" is the default below its original length, the only part that is supported.
    Source: config keys `rope_parameters` / `rope_scaling`; YaRN (arXiv 2309.00071, 3.2-3.4).
    """
    rope, dim = config.rope, config.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    inv_freq = rope.rope_theta**-exponents
    given = rope.parameters  # `RopeConfig` has checked that what a type needs is there
    original = given.get("original_max_position_embeddings") or config.max_position_embeddings
    if rope.rope_type == "linear":
        return inv_freq / given["factor"], 1.0
    if rope.rope_type == "llama3":
        low, high = given["low_freq_factor"], given["high_freq_factor"]
        turns = original * inv_freq / (2 * math.pi)  # rotations over the original context
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # 0: interpolate, 1: leave
        return inv_freq * (keep + (1 - keep) / given["factor"]), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, inv_freq, dim, original)
    return inv_freq, 1.0


def _yarn(rope: RopeConfig, inv_freq: Tensor, dim: int, original: int) -> tuple[Tensor, float]:
    given, get = rope.parameters, rope.parameters.get
    factor: float = given["factor"]

    def dimension(turns: float) -> float:
        """The (fractional) pair that makes `turns` rotations over the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension(get("beta_fast") or 32), dimension(get("beta_slow") or 1)
    if get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = (high - low) or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / span).clamp(0, 1)

    def magnitude(scale: float, weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention = get("attention_factor")
    if attention is None and get("mscale") and get("mscale_all_dim"):
        top, bottom = given["mscale"], given["mscale_all_dim"]
        attention = magnitude(factor, top) / magnitude(factor, bottom)
    elif attention is None:
        attention = magnitude(factor, 1.0)
    return inv_freq * (1 - ramp + ramp / factor), float(attention)
