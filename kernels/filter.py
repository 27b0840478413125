# mypy: allow-untyped-defs
"""Exact top-k, top-p and min-p thresholds without a sort.

Both top-k and top-p ask for the largest t such that what lies at or above it weighs enough: a
count, or a mass. Fixed bounds below the row's peak are weighed first, by many programs; what the
best bound leaves is nearly always few, and is gathered. One program then finds t bit by bit in the
order of the fp32 patterns. Where more is left than one program holds, it walks the whole row:
slow, and as exact. Nothing is added up in an order that could differ from run to run.

Definition: `ops.filter_logits`; the masses are sums of fp32 in another order.
"""

import torch
import triton
import triton.language as tl
from nanodflash.kernels.narrow import (
    bound_at,
    bracket,
    gather_kernel,
    peak_kernel,
    request,
    row_peak,
    scaled,
    weigh_kernel,
)
from nanodflash.kernels.words import number_of_key, sort_key
from torch import Tensor

CHUNK = 8192  # ids a program
BOUNDS = 16  # bound j lies j*j/8 below the peak, the last below everything
HELD = 4096  # candidates that the last program keeps in registers


@triton.jit
def _largest(
    goal,
    key,
    weight,
    row_ptr,
    heat,
    peak,
    vocab,
    least,
    COUNT: tl.constexpr,
    HELD: tl.constexpr,
):
    """The largest t such that the weights of keys >= max(t, least) make `goal`, 0 if none.

    `key` and `weight` are the first of the elements; ids HELD .. vocab-1 of the row the others.
    """
    found = tl.zeros([], tl.uint32)
    step = found + 0x80000000
    for _ in range(32):
        bar = tl.maximum(found + step, least)
        total = tl.sum(tl.where(key >= bar, weight, 0.0), 0)
        for base in range(HELD, vocab, HELD):
            token = base + tl.arange(0, HELD)
            z = scaled(row_ptr, token, vocab, heat)
            more = (token < vocab).to(tl.float32) if COUNT else tl.exp(z - peak)
            total += tl.sum(tl.where(sort_key(z) >= bar, more, 0.0), 0)
        found = tl.where(total >= goal, found + step, found)
        step = step >> 1
    return found


@triton.jit(do_not_specialize=["size"])
def _threshold_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    peaks_ptr,
    counts_ptr,
    masses_ptr,
    kept_ptr,
    threshold_ptr,
    size,
    vocab,
    chunks,
    CHUNKS: tl.constexpr,
    BOUNDS: tl.constexpr,
    HELD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heat, k, p, least, asks, search = request(
        row, size, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr
    )
    threshold = tl.full([], float("-inf"), tl.float32)
    if asks:
        if least > 0:
            threshold = row_peak(peaks_ptr, row, chunks, CHUNKS) + tl.log(least)
    if search:
        peak = row_peak(peaks_ptr, row, chunks, CHUNKS)
        best, counts, every = bracket(
            counts_ptr, masses_ptr, row, k, p, vocab, chunks, CHUNKS, BOUNDS
        )
        count = tl.sum(counts, 0)
        few = count <= HELD
        # The elements: what was gathered, or the whole row.
        lane, row_ptr = tl.arange(0, HELD), logits_ptr + row * vocab
        held, end = tl.where(few, count, 0), tl.where(few, 0, vocab)
        gathered = tl.load(kept_ptr + row * HELD + lane, mask=lane < held, other=0.0)
        z = tl.where(few, gathered, scaled(row_ptr, lane, end, heat))
        inside = lane < held + end
        key = tl.where(inside, sort_key(z), 0)
        # Masses here add up in another order than those that chose the bound; what lies below
        # the bound stays out all the same.
        found = sort_key(bound_at(best, peak, BOUNDS))
        if k > 0:
            goal = tl.minimum(k, vocab).to(tl.float32)
            ones = inside.to(tl.float32)
            kth = _largest(goal, key, ones, row_ptr, heat, peak, end, 0, True, HELD)
            found = tl.maximum(found, kth)
        if p < 1:
            weight = tl.where(inside, tl.exp(z - peak), 0.0)
            if k > 0:
                every = tl.sum(tl.where(key >= found, weight, 0.0), 0)
                for base in range(HELD, end, HELD):
                    token = base + lane
                    more = scaled(row_ptr, token, end, heat)
                    beyond = tl.where(sort_key(more) >= found, tl.exp(more - peak), 0.0)
                    every += tl.sum(beyond, 0)
            mass = _largest(p * every, key, weight, row_ptr, heat, peak, end, found, False, HELD)
            found = tl.maximum(found, tl.minimum(mass, sort_key(peak)))
        threshold = tl.maximum(threshold, number_of_key(found))
    tl.store(threshold_ptr + row, threshold)


def filter_thresholds(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """The smallest logits / temperature [B, S] fp32 that a row's filters keep; -inf = no filter.

    Args:
        logits:      [B, S, V], before the temperature.  temperature: [B] fp32; rows at 0 and
                     rows without a filter cost nothing.
        top_k:       [B] int64, 0 = off.  top_p: [B] fp32, 1 = off.  min_p: [B] fp32, 0 = off.
    """
    batch, size, vocab = logits.shape
    logits = logits.contiguous()
    rows, chunks = batch * size, triton.cdiv(vocab, CHUNK)
    padded = triton.next_power_of_2(chunks)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits.device)

    peaks, masses, kept = new(rows, chunks), new(rows, chunks, BOUNDS), new(rows, HELD)
    counts, threshold = new(rows, chunks, BOUNDS, dtype=torch.int32), new(batch, size)
    asked = (logits, temperature, top_k, top_p, min_p)
    weighed, sizes = (peaks, counts, masses), (size, vocab)
    grid, shape = (rows, chunks), {"CHUNKS": padded, "BOUNDS": BOUNDS}
    peak_kernel[grid](
        *asked, peaks, *sizes, CHUNK=CHUNK, BLOCK=1024, num_warps=4, enable_fp_fusion=False
    )
    weigh_kernel[grid](
        *asked,
        *weighed,
        *sizes,
        **shape,
        CHUNK=CHUNK,
        BLOCK=256,
        num_warps=4,
        enable_fp_fusion=False,
    )
    gather_kernel[grid](
        *asked,
        *weighed,
        kept,
        *sizes,
        **shape,
        HELD=HELD,
        CHUNK=CHUNK,
        BLOCK=1024,
        num_warps=4,
        enable_fp_fusion=False,
    )
    _threshold_kernel[(rows,)](
        *asked,
        *weighed,
        kept,
        threshold,
        *sizes,
        chunks,
        **shape,
        HELD=HELD,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return threshold
