"""How far each kernel is from its definition, at the shapes and in the dtype that are served."""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from nanodflash import ops
from nanodflash.models.config import TargetConfig

PAGE, PAGES = 64, 80  # places a page, pages a sequence


def kernel_errors(
    table: ops.Ops,
    config: TargetConfig,
    like: Tensor,
    contexts: Sequence[int] = (0, 63, 64, 1000, 4096),
    batches: Sequence[int] = (1, 32),
    widths: Sequence[int] = (16, 8, 1),
    prompts: Sequence[int] = (33, 300, 4096),
) -> list[dict[str, Any]]:
    """How far a kernel's numbers are from the definition's on the same inputs in fp32, and how far
    the definition's own are in the kernel's dtype: `error` and `rounding`, shares of the largest
    number, None where one is not finite. Of choices the share that differs.

    Args:
        like: of the dtype and device.
    """
    found: list[dict[str, Any]] = []

    def tell(kernel: str, case: str, got: Tensor, rounded: Tensor, wanted: Tensor) -> None:
        errors = {"error": _error(got, wanted), "rounding": _error(rounded, wanted)}
        found.append({"kernel": kernel, "case": case} | errors)

    with torch.inference_mode():
        for batch, context, width in product(batches, contexts, widths):
            case = f"{batch} x {width} rows after {context}"
            tell("attention", case, *_attention(table, config, like, batch, context, width))
        for length in prompts:
            case = f"a prompt of {length}"
            tell("attention", case, *_attention(table, config, like, 1, 0, length))
        for rows in (1, 16, 512):
            for name, *numbers in _rows(table, config, like, rows):
                tell(name, f"{rows} rows", *numbers)
    return found


def _error(got: Tensor, wanted: Tensor) -> float | None:
    if got.dtype == torch.int64:
        return float((got != wanted).float().mean())
    error = float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max())
    return error if math.isfinite(error) else None


def _new(like: Tensor, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=like.dtype, device=like.device)


def _attention(
    table: ops.Ops, config: TargetConfig, like: Tensor, batch: int, context: int, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal, over shuffled pages; what lies behind the rows is NaN."""
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    count = -(-(context + size) // PAGE)
    # A part of a page table, as it is served.
    pages = torch.zeros(batch, PAGES, dtype=torch.int64, device=like.device)[:, :count]
    pages.copy_(torch.randperm(batch * count, device=like.device).view(batch, count) + 1)
    pool = _new(like, 1, batch * count + 2, PAGE, 2, kv_heads, dim)
    pool[:, pages[:, -1], (context + size - 1) % PAGE + 1 :] = float("nan")
    pool[:, -1] = 0
    start = torch.full((batch,), context, device=like.device)
    q = _new(like, batch, size, heads, dim)

    def run(attention: Callable[..., ops.Attend], q: Tensor, pool: Tensor) -> Tensor:
        return attention(pages, start, size, True, None, pool)(q, pool[0])

    return (
        run(table.attention, q, pool),
        run(ops.attention, q, pool),
        run(ops.attention, q.float(), pool.float()),
    )


def _rows(
    table: ops.Ops, config: TargetConfig, like: Tensor, rows: int
) -> list[tuple[str, Tensor, Tensor, Tensor]]:
    """Every other kernel; tensors that are written come back too."""
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    h, delta = _new(like, rows, config.hidden_size), _new(like, rows, config.hidden_size)
    weight, unit = _new(like, config.hidden_size), _new(like, dim)
    gate_up = _new(like, rows, 2 * config.intermediate_size)
    qkv = _new(like, 1, rows, heads + 2 * kv_heads, dim)
    turn = ops.Rotary(_new(like, 1, rows, 1, dim), _new(like, 1, rows, 1, dim))
    pool = like.new_zeros(2, -(-rows // PAGE) + 2, PAGE, 2, kv_heads, dim)
    index = torch.arange(rows, device=like.device)[None] + PAGE
    kv, norms = _new(like, 1, rows, 2, 2 * kv_heads, dim), _new(like, 2, dim)
    logits = _new(like, 1, rows, config.vocab_size)
    one = torch.ones(1, device=like.device)
    wishes = (one, index[0, :1] * 0 + 20, 0.95 * one, 0 * one, index[0, :1], index)

    def run(table: ops.Ops, wide: bool) -> dict[str, Tensor]:
        def as_wanted(x: Tensor) -> Tensor:
            return x.to(torch.float32 if wide else x.dtype, copy=True)  # it may be written

        turned = ops.Rotary(*map(as_wanted, turn))
        own, injected = as_wanted(pool), as_wanted(pool)
        given = as_wanted(qkv), as_wanted(unit), as_wanted(unit), 1e-6, turned, own[0], index
        q = table.norm_rope_write(*given)
        table.inject_rows(as_wanted(kv), as_wanted(norms), 1e-6, turned, injected, index)
        total, normed = table.add_rms_norm(as_wanted(h), as_wanted(delta), as_wanted(weight), 1e-6)
        return {
            "norm_rope_write, queries": q,
            "norm_rope_write, pages": own,
            "inject_rows": injected,
            "rms_norm": table.rms_norm(as_wanted(h), as_wanted(weight), 1e-6),
            "add_rms_norm, sum": total,
            "add_rms_norm": normed,
            "silu_mul": table.silu_mul(as_wanted(gate_up)),
            "argmax": table.argmax(logits),
            "choose": table.choose(logits, *wishes),
        }

    mine, rounded = run(table, False), run(ops.REFERENCE, False)
    wanted = run(ops.REFERENCE, True)
    return [(name, mine[name], rounded[name], wanted[name]) for name in mine]
