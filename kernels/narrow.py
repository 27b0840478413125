# mypy: allow-untyped-defs
"""The few tokens among which a filter's threshold lies: the part that many programs share.

Fixed bounds below a row's peak are weighed, by count and by mass; the highest that leaves enough
is the row's, and what lies at or above it is gathered where it fits.
"""

import triton
import triton.language as tl


@triton.jit
def request(row, size, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr):
    """Temperature, k, p, min-p of a row, and what it asks for: anything; a search."""
    at = row // size
    heat, least = tl.load(temperature_ptr + at), tl.load(min_p_ptr + at)
    k, p = tl.load(top_k_ptr + at), tl.load(top_p_ptr + at)
    search = (heat > 0) & ((k > 0) | (p < 1))
    return heat, k, p, least, search | ((heat > 0) & (least > 0)), search


@triton.jit
def scaled(row_ptr, token, end, heat):
    """Logits over temperature, rounded as a true division; -inf past `end`."""
    x = tl.load(row_ptr + token, mask=token < end, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, heat)


@triton.jit
def bound_at(j, peak, BOUNDS: tl.constexpr):
    """Bound j: j*j/8 below the peak, an exact product; the last is below everything."""
    return tl.where(j < BOUNDS - 1, peak - (j * j).to(tl.float32) * 0.125, float("-inf"))


@triton.jit
def row_peak(peaks_ptr, row, chunks, CHUNKS: tl.constexpr):
    """The largest of all chunks."""
    chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(peaks_ptr + row * chunks + chunk, chunk < chunks, float("-inf")), 0)


@triton.jit
def bracket(
    counts_ptr, masses_ptr, row, k, p, vocab, chunks, CHUNKS: tl.constexpr, BOUNDS: tl.constexpr
):
    """The highest bound that leaves enough: its index, counts by chunk, and all mass."""
    chunk, bound = tl.arange(0, CHUNKS)[:, None], tl.arange(0, BOUNDS)
    at = (row * chunks + chunk) * BOUNDS + bound[None, :]
    counts = tl.load(counts_ptr + at, chunk < chunks, 0)
    mass = tl.sum(tl.load(masses_ptr + at, chunk < chunks, 0.0), 0)
    every = tl.sum(tl.where(bound == BOUNDS - 1, mass, 0.0), 0)
    by_count = tl.sum(counts, 0) >= tl.minimum(k, vocab)
    enough = tl.where(k > 0, by_count, mass >= p * every)
    best = tl.min(tl.where(enough, bound, BOUNDS - 1), 0)
    return best, tl.sum(tl.where(bound[None, :] == best, counts, 0), 1), every


@triton.jit(do_not_specialize=["size"])  # it only divides a row
def peak_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    peaks_ptr,
    size,
    vocab,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat, _k, _p, _least, asks, _search = request(
        row, size, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr
    )
    if asks:
        end = tl.minimum((chunk + 1) * CHUNK, vocab)
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        for base in range(chunk * CHUNK, end, BLOCK):
            token = base + tl.arange(0, BLOCK)
            top = tl.maximum(top, scaled(logits_ptr + row * vocab, token, end, heat))
        tl.store(peaks_ptr + row * tl.num_programs(1) + chunk, tl.max(top, 0))


@triton.jit(do_not_specialize=["size"])  # it only divides a row
def weigh_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    peaks_ptr,
    counts_ptr,
    masses_ptr,
    size,
    vocab,
    CHUNKS: tl.constexpr,
    BOUNDS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    heat, _k, _p, _least, _asks, search = request(
        row, size, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr
    )
    if search:
        peak = row_peak(peaks_ptr, row, chunks, CHUNKS)
        bounds = bound_at(tl.arange(0, BOUNDS), peak, BOUNDS)
        end = tl.minimum((chunk + 1) * CHUNK, vocab)
        count = tl.zeros([BLOCK, BOUNDS], tl.int32)
        mass = tl.zeros([BLOCK, BOUNDS], tl.float32)
        for base in range(chunk * CHUNK, end, BLOCK):
            token = base + tl.arange(0, BLOCK)
            z = scaled(logits_ptr + row * vocab, token, end, heat)
            above = (z[:, None] >= bounds[None, :]) & (token < end)[:, None]
            count += above.to(tl.int32)
            mass += tl.where(above, tl.exp(z - peak)[:, None], 0.0)
        at = (row * chunks + chunk) * BOUNDS + tl.arange(0, BOUNDS)
        tl.store(counts_ptr + at, tl.sum(count, 0))
        tl.store(masses_ptr + at, tl.sum(mass, 0))


@triton.jit(do_not_specialize=["size"])  # it only divides a row
def gather_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    peaks_ptr,
    counts_ptr,
    masses_ptr,
    kept_ptr,
    size,
    vocab,
    CHUNKS: tl.constexpr,
    BOUNDS: tl.constexpr,
    HELD: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    heat, k, p, _least, _asks, search = request(
        row, size, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr
    )
    if search:
        best, counts, _every = bracket(
            counts_ptr, masses_ptr, row, k, p, vocab, chunks, CHUNKS, BOUNDS
        )
        if tl.sum(counts, 0) <= HELD:
            bound = bound_at(best, row_peak(peaks_ptr, row, chunks, CHUNKS), BOUNDS)
            done = tl.sum(tl.where(tl.arange(0, CHUNKS) < chunk, counts, 0), 0)
            end = tl.minimum((chunk + 1) * CHUNK, vocab)
            for base in range(chunk * CHUNK, end, BLOCK):
                token = base + tl.arange(0, BLOCK)
                z = scaled(logits_ptr + row * vocab, token, end, heat)
                above = (z >= bound) & (token < end)
                at = done + tl.cumsum(above.to(tl.int32), 0) - 1
                tl.store(kept_ptr + row * HELD + at, z, mask=above)
                done += tl.sum(above.to(tl.int32), 0)
