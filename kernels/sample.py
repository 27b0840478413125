# mypy: allow-untyped-defs
"""The choice of a token: argmax over the vocabulary, plain or with keyed noise, in two stages.

A candidate is one integer: the sort key of its value above its id counted from the end. The
largest is the largest value with the lowest id, whatever the order of the reduction, and always
names an id, also where the values are NaN.

Definition: `decoding.sampling.choose` and `propose`, `ops.keyed_gumbel`.
"""

import torch
import triton
import triton.language as tl
from nanodflash.kernels.filter import filter_thresholds
from nanodflash.kernels.words import (
    gumbel,
    number_of_key,
    row_keys,
    sort_key,
    uniform,
)
from torch import Tensor

CHUNK, BLOCK = 8192, 2048  # ids a program, and ids at a time
LAST = tl.constexpr(2**31 - 1)  # the id that counts from the end


@triton.jit
def _candidate(value, token, inside):
    word = (sort_key(value).to(tl.int64) << 31) | (token ^ LAST)
    return tl.where(inside, word, -1)


@triton.jit
def _best_kernel(logits_ptr, best_ptr, vocab, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Plain argmax, stage 1: the best candidate of a chunk."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.minimum((chunk + 1) * CHUNK, vocab)
    best = tl.full([BLOCK], -1, tl.int64)
    for base in range(chunk * CHUNK, end, BLOCK):
        token = base + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * vocab + token, mask=token < end, other=0.0)
        best = tl.maximum(best, _candidate(x.to(tl.float32), token, token < end))
    tl.store(best_ptr + row * tl.num_programs(1) + chunk, tl.max(best, 0))


# Rows of any width, which begin anywhere: no variant of each for that.
@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["position_ptr"])
def _sample_kernel(
    logits_ptr,
    threshold_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    best_ptr,
    size,
    vocab,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The seeded choice, stage 1."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature_ptr + row // size)
    threshold = tl.load(threshold_ptr + row)
    a, b = row_keys(tl.load(seed_ptr + row // size), tl.load(position_ptr + row))
    end = tl.minimum((chunk + 1) * CHUNK, vocab)
    best = tl.full([BLOCK], -1, tl.int64)
    for base in range(chunk * CHUNK, end, BLOCK):
        token = base + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * vocab + token, mask=token < end, other=0.0).to(tl.float32)
        if heat > 0:  # a greedy row pays for no noise
            x = tl.div_rn(x, heat)
            x = tl.where(x < threshold, float("-inf"), x) + gumbel(uniform(a, b, token))
        best = tl.maximum(best, _candidate(x, token, token < end))
    tl.store(best_ptr + row * tl.num_programs(1) + chunk, tl.max(best, 0))


@triton.jit
def _token_kernel(best_ptr, token_ptr, chunks, CHUNKS: tl.constexpr):
    """Stage 2: the best of all chunks."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    best = tl.max(tl.load(best_ptr + row * chunks + chunk, mask=chunk < chunks, other=-1), 0)
    tl.store(token_ptr + row, (best & LAST) ^ LAST)


@triton.jit
def _mass_kernel(
    logits_ptr,
    best_ptr,
    mass_ptr,
    vocab,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mass of a chunk, where the peak of the row weighs 1."""
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    lane = tl.arange(0, CHUNKS)
    best = tl.max(tl.load(best_ptr + row * chunks + lane, mask=lane < chunks, other=-1), 0)
    peak = number_of_key((best >> 31).to(tl.uint32))
    end = tl.minimum((chunk + 1) * CHUNK, vocab)
    mass = tl.zeros([BLOCK], tl.float32)
    for base in range(chunk * CHUNK, end, BLOCK):
        token = base + tl.arange(0, BLOCK)
        at = logits_ptr + row * vocab + token
        x = tl.load(at, mask=token < end, other=float("-inf")).to(tl.float32)
        mass += tl.exp(x - peak)
    tl.store(mass_ptr + row * chunks + chunk, tl.sum(mass, 0))


@triton.jit
def _propose_kernel(best_ptr, coupled_ptr, mass_ptr, token_ptr, chunks, sure, CHUNKS: tl.constexpr):
    """Stage 2 of a proposal: the likeliest where its share is above `sure`, else the coupled."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    at, inside = row * chunks + chunk, chunk < chunks
    best = tl.max(tl.load(best_ptr + at, mask=inside, other=-1), 0)
    coupled = tl.max(tl.load(coupled_ptr + at, mask=inside, other=-1), 0)
    mass = tl.sum(tl.load(mass_ptr + at, mask=inside, other=0.0), 0)
    tl.store(token_ptr + row, (tl.where(mass * sure < 1.0, best, coupled) & LAST) ^ LAST)


def _chunks(vocab: int) -> tuple[int, int]:
    chunks = triton.cdiv(vocab, CHUNK)
    return chunks, triton.next_power_of_2(chunks)


def _best(logits: Tensor) -> Tensor:
    """Candidates of [..., V]: [..., chunks] int64."""
    vocab = logits.shape[-1]
    chunks, _ = _chunks(vocab)
    best = torch.empty(*logits.shape[:-1], chunks, dtype=torch.int64, device=logits.device)
    grid = (best.numel() // chunks, chunks)
    _best_kernel[grid](
        logits, best, vocab, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False
    )
    return best


def _tokens(best: Tensor) -> Tensor:
    """[..., chunks] -> [...] ids."""
    tokens = torch.empty(best.shape[:-1], dtype=torch.int64, device=best.device)
    chunks = best.shape[-1]
    padded = triton.next_power_of_2(chunks)
    _token_kernel[(tokens.numel(),)](
        best, tokens, chunks, CHUNKS=padded, num_warps=1, enable_fp_fusion=False
    )
    return tokens


def argmax(logits: Tensor) -> Tensor:
    """Of [..., V]: [...] int64, the lowest id on ties, an id also for NaN."""
    return _tokens(_best(logits.contiguous()))


def _coupled(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    positions: Tensor,
) -> Tensor:
    batch, size, vocab = logits.shape
    threshold = filter_thresholds(logits, temperature, top_k, top_p, min_p)
    chunks, _ = _chunks(vocab)
    best = torch.empty(batch, size, chunks, dtype=torch.int64, device=logits.device)
    _sample_kernel[(batch * size, chunks)](
        logits,
        threshold,
        temperature,
        seed,
        positions.contiguous(),
        best,
        size,
        vocab,
        CHUNK=CHUNK,
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return best


def choose(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    positions: Tensor,
) -> Tensor:
    """The seeded choice at every row [B, S] int64; rows at temperature 0 take the plain argmax.

    Args:
        logits:      [B, S, V].  temperature, top_p, min_p: [B] fp32.  top_k, seed: [B] int64.
        positions:   [B, S] int64, absolute position of the token that is chosen.
    """
    logits = logits.contiguous()
    return _tokens(_coupled(logits, temperature, top_k, top_p, min_p, seed, positions))


def propose(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    positions: Tensor,
    sure: float,
) -> Tensor:
    """A block's proposals [B, S] int64: the argmax where its share is above `sure`, else `choose`.

    Args as `choose`; the share is that of the raw logits.
    """
    logits = logits.contiguous()
    coupled = _coupled(logits, temperature, top_k, top_p, min_p, seed, positions)
    best, vocab = _best(logits), logits.shape[-1]
    chunks, padded = _chunks(vocab)
    mass = torch.empty(best.shape, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(best.shape[:-1], dtype=torch.int64, device=logits.device)
    rows = tokens.numel()
    _mass_kernel[(rows, chunks)](
        logits,
        best,
        mass,
        vocab,
        CHUNKS=padded,
        CHUNK=CHUNK,
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )
    _propose_kernel[(rows,)](
        best,
        coupled,
        mass,
        tokens,
        chunks,
        sure,
        CHUNKS=padded,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return tokens
