"""How fast each kernel is at one shape, beside the products of matrices around it."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nanodflash import ops
from nanodflash.models.qwen3 import Qwen3


def kernel_times(
    model: Qwen3, table: ops.Ops, size: int, batch: int, context: int, peak: float
) -> list[dict[str, Any]]:
    """Milliseconds of every kernel at one shape, and its share of peak bandwidth (None where the
    cache serves it).

    Args:
        size: S.  peak: TB/s.
    """
    from triton.testing import do_bench_cudagraph

    target, like = model.config, model.embed_tokens
    page, dim, device, item = 64, target.head_dim, like.device, like.element_size()
    heads, kv_heads, layers = target.num_attention_heads, target.num_key_value_heads, 5
    rows = batch * size

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=like.dtype, device=device)

    count = -(-(context + size) // page)
    pages = torch.randperm(batch * count, device=device).view(batch, count) + 1
    start = torch.full((batch,), context, device=device)
    pool = new(layers, batch * count + 1, page, 2, kv_heads, dim)
    x, delta = new(rows, target.hidden_size), new(rows, target.hidden_size)
    weight = new(target.hidden_size)
    gate_up = new(rows, 2 * target.intermediate_size)
    qkv, norm = new(batch, size, heads + 2 * kv_heads, dim), new(dim)
    turn = ops.Rotary(new(batch, size, 1, dim), new(batch, size, 1, dim))
    index = torch.arange(rows, device=device).view(batch, size) + page
    kv, norms = new(batch, size, layers, 2 * kv_heads, dim), new(layers, dim)
    logits = new(batch, size, target.vocab_size)
    ones, zeros = torch.ones(batch, device=device), torch.zeros_like(start)
    wishes = (ones, zeros + 20, 0.95 * ones, 0 * ones, zeros, index)
    attend = table.attention(pages, start, size, True, None, pool)
    q = new(batch, size, heads, dim)
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "attention": (
            lambda: attend(q, pool[0]),
            (2 * q.numel() + batch * (context + size) * 2 * kv_heads * dim) * item,
        ),
        "norm_rope_write": (
            lambda: table.norm_rope_write(qkv, norm, norm, 1e-6, turn, pool[0], index),
            2 * qkv.numel() * item,
        ),
        "inject_rows": (
            lambda: table.inject_rows(kv, norms, 1e-6, turn, pool, index),
            2 * kv.numel() * item,
        ),
        "rms_norm": (lambda: table.rms_norm(x, weight, 1e-6), 2 * x.numel() * item),
        "add_rms_norm": (lambda: table.add_rms_norm(x, delta, weight, 1e-6), 4 * x.numel() * item),
        "silu_mul": (lambda: table.silu_mul(gate_up), gate_up.numel() * item * 3 // 2),
        "argmax": (lambda: table.argmax(logits), logits.numel() * item),
        "choose": (lambda: table.choose(logits, *wishes), logits.numel() * item),
    }
    for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
        # Of several layers in turn: one alone would stay in the cache.
        matrices: list[Any] = [getattr(layer, name) for layer in model.layers[:8]]
        given = new(rows, matrices[0].shape[1])
        moved = sum(matrix.numel() for matrix in matrices) * item
        calls[f"8 x {name}"] = (partial(_products, given, matrices), moved)
    calls["matrix lm_head"] = (lambda: model.logits(x), model.lm_head.numel() * item)
    torch.cuda.synchronize()  # what is measured runs on another stream
    found = []
    cached = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    gc.collect()
    gc.disable()  # a kernel that it frees within a capture would end the capture
    try:
        for name, (call, moved) in calls.items():
            ms = do_bench_cudagraph(call, rep=20)
            row = {"kernel": name, "batch": batch, "context": context, "ms": ms}
            # What the device's cache can hold is not read from memory.
            share = moved / (ms * 1e-3) / (peak * 1e12) if moved > cached else None
            found.append(row | {"share": share})
    finally:
        gc.enable()
    return found


def _products(given: Tensor, matrices: list[Tensor]) -> None:
    for matrix in matrices:
        F.linear(given, matrix)
