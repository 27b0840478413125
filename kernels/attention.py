# mypy: allow-untyped-defs
"""Paged attention of a few query rows a request, or of a whole prompt chunk.

The query heads of one K/V head and the rows of the block are packed into one tile, so that K and
V are read once: row r of a tile is block position r // GROUP of head r % GROUP in the group.

The keys are cut into tiles of BLOCK_N, and tile t belongs to split t mod SPLITS. Both are
constants of the launch, and a tile in which a row sees nothing leaves that row's sums exactly as
they were: the bits of a row depend neither on where its block starts nor on its neighbours.

Definition: `ops.paged_attention` with `ops.attention_mask`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_N = 64  # keys a tile
MAX_SPLITS = 32
PROGRAMS = 256  # about two for every multiprocessor of a large GPU
ROWS = 4  # rows that one program combines


# Prompt chunks have any length and lie anywhere in a page table: no variant of each for that.
ANY = {
    "do_not_specialize": ["size", "num_places", "row_tiles"],
    "do_not_specialize_on_alignment": ["pages_ptr", "start_ptr"],
}


@triton.jit(**ANY)
def _attention_kernel(
    q_ptr,
    rows_ptr,
    pages_ptr,
    start_ptr,
    out_ptr,
    partial_ptr,
    sums_ptr,
    size,
    num_places,
    row_tiles,
    q_batch,
    q_row,
    q_head,
    out_batch,
    out_row,
    out_head,
    rows_page,
    rows_place,
    rows_kv,
    rows_head,
    pages_batch,
    scale,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile_id, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, row_tile = tile_id // row_tiles, tile_id % row_tiles
    start = tl.load(start_ptr + batch).to(tl.int32)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    place = row // GROUP
    position = start + place
    alive = place < size
    dims = tl.arange(0, DIM)
    q_at = batch.to(tl.int64) * q_batch + place * q_row + (head * GROUP + row % GROUP) * q_head
    q = tl.load(q_ptr + q_at[:, None] + dims[None, :], mask=alive[:, None], other=0.0)

    # Only what is written: a table row that is too short for the block (a row that is not active)
    # must not be read past its end.
    end = tl.minimum(start + size, num_places)
    first_place = row_tile * BLOCK_M // GROUP
    last_place = (row_tile * BLOCK_M + BLOCK_M - 1) // GROUP
    stop = end
    if CAUSAL:
        stop = tl.minimum(end, start + last_place + 1)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(start + first_place - WINDOW + 1, 0) // BLOCK_N
        if not CAUSAL:
            stop = tl.minimum(end, start + last_place + WINDOW)
    mine = lowest + (split + SPLITS - lowest % SPLITS) % SPLITS

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    for base in range(mine * BLOCK_N, stop, SPLITS * BLOCK_N):
        key = base + tl.arange(0, BLOCK_N)
        written = key < end
        if PAGE % BLOCK_N == 0:  # a tile lies in one page
            page = tl.load(pages_ptr + batch * pages_batch + base // PAGE)
        else:
            page = tl.load(pages_ptr + batch * pages_batch + key // PAGE, mask=written, other=0)
        at = page * rows_page + (key % PAGE) * rows_place + head * rows_head
        kv_at = at[:, None] + dims[None, :]
        # What lies behind the block may be NaN, and zero times NaN is NaN: V is masked as K is.
        k = tl.load(rows_ptr + kv_at, mask=written[:, None], other=0.0)
        v = tl.load(rows_ptr + rows_kv + kv_at, mask=written[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        distance = position[:, None] - key[None, :]
        seen = written[None, :]
        if CAUSAL:
            seen = seen & (distance >= 0)
        if WINDOW > 0:
            seen = seen & (distance < WINDOW)
            if not CAUSAL:
                seen = seen & (distance > -WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: not inf - inf
        weight = tl.exp2((scores - finite[:, None]) * scale)
        keep = tl.exp2((top - finite) * scale)
        total = total * keep + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
        top = higher

    if SPLITS == 1:
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        head_at = (head * GROUP + row % GROUP) * out_head
        out_at = batch.to(tl.int64) * out_batch + place * out_row + head_at
        out_at = out_ptr + out_at[:, None] + dims[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=alive[:, None])
    else:
        # (-inf, 0) from a split without keys, whose zeros need not be written
        block = (tile_id * tl.num_programs(1) + head) * SPLITS + split
        lane = block * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(sums_ptr + lane * 2, top)
        tl.store(sums_ptr + lane * 2 + 1, total)
        if mine * BLOCK_N < stop:
            tl.store(partial_ptr + lane[:, None] * DIM + dims[None, :], acc)


@triton.jit(**ANY | {"do_not_specialize_on_alignment": ["start_ptr"]})
def _combine_kernel(
    partial_ptr,
    sums_ptr,
    start_ptr,
    out_ptr,
    size,
    num_places,
    row_tiles,
    out_batch,
    out_row,
    out_head,
    scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):
    tile_id, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, row_tile = tile_id // row_tiles, tile_id % row_tiles
    end = tl.minimum(tl.load(start_ptr + batch).to(tl.int32) + size, num_places)
    lane = part * ROWS + tl.arange(0, ROWS)
    row = row_tile * BLOCK_M + lane
    place = row // GROUP
    alive = place < size
    first = (tile_id * tl.num_programs(1) + head) * SPLITS * BLOCK_M + lane
    dims = tl.arange(0, DIM)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    # Ascending, always. The splits behind the last tile are empty: they would change nothing.
    for split in tl.range(0, tl.minimum(SPLITS, tl.cdiv(end, BLOCK_N)), num_stages=4):
        at = first + split * BLOCK_M
        mine = tl.load(sums_ptr + at * 2, mask=alive, other=float("-inf"))
        count = tl.load(sums_ptr + at * 2 + 1, mask=alive, other=0.0)
        filled = mine > float("-inf")
        part_at = partial_ptr + at[:, None] * DIM + dims[None, :]
        values = tl.load(part_at, mask=filled[:, None], other=0.0)
        higher = tl.maximum(top, mine)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        keep, weight = tl.exp2((top - finite) * scale), tl.exp2((mine - finite) * scale)
        total = total * keep + count * weight
        acc = acc * keep[:, None] + values * weight[:, None]
        top = higher
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    head_at = (head * GROUP + row % GROUP) * out_head
    out_at = batch.to(tl.int64) * out_batch + place * out_row + head_at
    out_at = out_ptr + out_at[:, None] + dims[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=alive[:, None])


def paged_attention(
    q: Tensor,
    rows: Tensor,
    pages: Tensor,
    start: Tensor,
    causal: bool,
    window: int | None,
    splits: int | None = None,
) -> Tensor:
    """Attention of the rows at start .. start+S-1 over their pages: [B, S, Hq, D].

    Args:
        q:      [B, S, Hq, D]; D is a power of two of at least 16, contiguous. S may be a block
                or a prompt chunk.
        rows:   [N, P, 2, Hkv, D], one layer's pages, this block's K and V included.
        pages:  [B, n] int64 page ids in order of position; places behind the block are not read.
        start:  [B] int64, the position of row 0.
        causal, window: as in `ops.attention_mask`.
        splits: programs that share one tile's keys; the default follows from the shapes of `q`
                and `rows` alone, so that equal shapes give equal bits.
    """
    batch, size, heads, dim = q.shape
    page_size, kv_heads = rows.shape[1], rows.shape[3]
    assert q.stride(-1) == rows.stride(-1) == pages.stride(-1) == 1
    group = heads // kv_heads
    wide = q.element_size() > 2  # fp32 fills no tensor cores, and registers twice as fast
    block_m = min(max(16, triton.next_power_of_2(size * group)), 32 if wide else 128)
    row_tiles = triton.cdiv(size * group, block_m)
    num_places = pages.shape[1] * page_size
    if splits is None:
        programs = triton.next_power_of_2(batch * row_tiles * kv_heads)
        splits = min(max(PROGRAMS // programs, 1), MAX_SPLITS)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    partial = sums = out  # not touched by a lone split
    if splits > 1:
        blocks = batch * row_tiles * kv_heads * splits
        partial = torch.empty(blocks, block_m, dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(blocks, block_m, 2, dtype=torch.float32, device=q.device)
    scale = dim**-0.5 * 1.4426950408889634  # exp2, not exp
    _attention_kernel[(batch * row_tiles, kv_heads, splits)](
        q,
        rows,
        pages,
        start,
        out,
        partial,
        sums,
        size,
        num_places,
        row_tiles,
        *q.stride()[:3],
        *out.stride()[:3],
        *rows.stride()[:4],
        pages.stride(0),
        scale,
        PAGE=page_size,
        GROUP=group,
        DIM=dim,
        CAUSAL=causal,
        WINDOW=window or 0,
        SPLITS=splits,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        PRECISION="ieee",
        num_warps=8 if block_m > 64 or wide else 4,
        enable_fp_fusion=False,
        num_stages=2 if wide else 3,
    )
    if splits > 1:
        _combine_kernel[(batch * row_tiles, kv_heads, block_m // ROWS)](
            partial,
            sums,
            start,
            out,
            size,
            num_places,
            row_tiles,
            *out.stride()[:3],
            scale,
            GROUP=group,
            DIM=dim,
            SPLITS=splits,
            BLOCK_M=block_m,
            BLOCK_N=BLOCK_N,
            ROWS=ROWS,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out
