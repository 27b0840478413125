"""Paged K/V: one page table, two pools, and what a step sees of them.

A page id means the same tokens in the target's pool and in the drafter's. Nothing is rolled
back: a cycle writes S rows at len .. len+S-1 in both, acceptance moves `len`, and what lies
beyond is garbage that the next cycle overwrites and no attention counts.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nanodflash import ops
from nanodflash.models.config import DraftConfig, TransformerConfig


class Sight(NamedTuple):
    """How the rows of one layer see: causality inside the block, and the sliding window."""

    causal: bool
    window: int | None


class KVPool:
    """All pages of one model: `rows` [L, N, P, 2, Hkv, D]. Page 0 is the dummy page."""

    def __init__(
        self, config: TransformerConfig, num_pages: int, page_size: int, like: Tensor
    ) -> None:
        shape = (config.num_hidden_layers, num_pages, page_size, 2)
        heads = (config.num_key_value_heads, config.head_dim)
        self.rows = like.new_zeros(*shape, *heads)
        self.page_size = page_size
        if isinstance(config, DraftConfig):
            self.sights = list(map(Sight, config.causal, config.windows))
        else:
            self.sights = [Sight(causal=True, window=None)] * config.num_hidden_layers


@dataclass
class RowWriter:
    """Where the rows of one step go. A `Writer`.

    Attributes:
        rows:  [L, N, P, 2, Hkv, D], the pool's.
        index: [...] int64, page * P + offset, from `row_index`.
    """

    rows: Tensor
    index: Tensor

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write one layer's rows, k and v [..., Hkv, D]."""
        ops.write_rows(self.rows[layer], self.index, k, v)


@dataclass
class PagedMemory(RowWriter):
    """B rows of S consecutive positions each: what they write and what they see. A `Memory`.

    Attributes:
        pages:     [B, n], the first n pages of every row.
        masks:     per layer [B, 1, S, n*P].
        unwritten: [B, n*P], places behind the block.
    """

    pages: Tensor
    masks: list[Tensor]
    unwritten: Tensor

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the block's rows, then see the context and the block."""
        self.write(layer, k, v)
        return ops.paged_attention(
            q, self.rows[layer], self.pages, self.masks[layer], self.unwritten
        )


@dataclass
class RaggedMemory:
    """Prompt chunks of several requests, flattened to T rows. A `Memory`.

    Attributes:
        spans: rows `start:stop` of T that are one request's, and that request's memory.
    """

    spans: list[tuple[int, int, PagedMemory]]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D]: each span sees its own request only."""
        seen = [
            memory.attend(layer, q[None, a:b], k[None, a:b], v[None, a:b])[0]
            for a, b, memory in self.spans
        ]
        return torch.cat(seen)


def row_index(table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Where the K/V rows of `positions` [B, S] lie, by page table rows [B, n]: [B, S]."""
    return table.gather(1, positions // page_size) * page_size + positions % page_size


def paged_memory(
    pool: KVPool, table: Tensor, start: Tensor, offsets: Tensor, keys: Tensor, kv_bound: int
) -> PagedMemory:
    """The memory of the rows at `start + offsets`.

    Args:
        table:    [B, pages_per_seq] page ids; all 0 for a row that must leave no trace.
        start:    [B] int64.  offsets: [S] int64, 0 .. S-1.
        keys:     int64 0, 1, 2, ..., as long as a page table row has places.
        kv_bound: the host's upper bound of start + S over the rows; pages behind it are not read.
    """
    n = -(-kv_bound // pool.page_size)
    keys = keys[: n * pool.page_size]
    made = {
        sight: ops.attention_mask(start, offsets, keys, sight.causal, sight.window, pool.rows)
        for sight in set(pool.sights)
    }
    return PagedMemory(
        pool.rows,
        row_index(table, start[:, None] + offsets, pool.page_size),
        table[:, :n],
        [made[sight] for sight in pool.sights],
        keys >= (start + offsets.shape[0])[:, None],
    )
