"""Paged K/V: one page table, two pools, and what a step sees of them.

A page id means the same tokens in the target's pool and in the drafter's. Nothing is rolled
back: a cycle writes S rows at len .. len+S-1 in both, acceptance moves `len`, and what lies
beyond is garbage that the next cycle overwrites and no attention counts.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nanodflash.models.config import DraftConfig, TransformerConfig
from nanodflash.models.layers import Heads
from nanodflash.ops import Attend, Ops, Rotary


class Sight(NamedTuple):
    """How the rows of one layer see: causality inside the block, and the sliding window."""

    causal: bool
    window: int | None


class KVPool:
    """All pages of one model: `rows` [L, N + 1, P, 2, Hkv, D].

    Page 0 is the dummy page. Page N has no id that is ever given out: it stays zero, and stands for
    what is not written (`ops.row_places`).
    """

    def __init__(
        self, config: TransformerConfig, num_pages: int, page_size: int, like: Tensor
    ) -> None:
        shape = (config.num_hidden_layers, num_pages + 1, page_size, 2)
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
        ops:   the engine's operations.
    """

    rows: Tensor
    index: Tensor
    ops: Ops

    def inject(self, kv: Tensor, k_norms: Tensor, eps: float, rotary: Rotary) -> None:
        """Write the rows of all layers."""
        self.ops.inject_rows(kv, k_norms, eps, rotary, self.rows, self.index)

    def write(self, layer: int, heads: Heads) -> Tensor:
        """Write one layer's rows; their queries [..., Hq, D]."""
        qkv, q_norm, k_norm, eps, rotary, _ = heads
        args = (qkv, q_norm, k_norm, eps, rotary)
        return self.ops.norm_rope_write(*args, self.rows[layer], self.index)


@dataclass
class PagedMemory(RowWriter):
    """B rows of S consecutive positions each: what they write and what they see. A `Memory`.

    Attributes:
        seen: of every layer, its queries and pages -> what the queries see.
    """

    seen: list[Attend]

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """Write the block's rows, then see the context and the block."""
        return self.seen[layer](self.write(layer, heads), self.rows[layer])


@dataclass
class RaggedMemory(RowWriter):
    """Prompt chunks of several requests, flattened to T rows. A `Memory`.

    Attributes:
        spans: rows `start:stop` of T that are one request's, and what they see.
    """

    spans: list[tuple[int, int, list[Attend]]]

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """Write all rows, then each span sees its own request only: [T, Hq, D]."""
        q, rows = self.write(layer, heads), self.rows[layer]
        parts = [seen[layer](q[None, a:b], rows)[0] for a, b, seen in self.spans]
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def row_index(table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Where the K/V rows of `positions` [B, S] lie, by page table rows [B, n]: [B, S]."""
    return table.gather(1, positions // page_size) * page_size + positions % page_size


def sees(
    pool: KVPool, table: Tensor, start: Tensor, size: int, kv_bound: int, ops: Ops
) -> list[Attend]:
    """What the rows at start .. start+size-1 see in every layer.

    Args:
        table:    [B, pages_per_seq] page ids.  start: [B] int64.
        kv_bound: the host's upper bound of start + size; pages behind it are not read.
    """
    pages = table[:, : -(-kv_bound // pool.page_size)]
    made = {
        sight: ops.attention(pages, start, size, sight.causal, sight.window, pool.rows)
        for sight in set(pool.sights)
    }
    return [made[sight] for sight in pool.sights]


def paged_memory(
    pool: KVPool, table: Tensor, start: Tensor, positions: Tensor, kv_bound: int, ops: Ops
) -> PagedMemory:
    """The memory of B rows of S positions each.

    Args:
        table:     [B, pages_per_seq] page ids; all 0 for a row that must leave no trace.
        positions: [B, S] int64, from `start` [B] on.
    """
    seen = sees(pool, table, start, positions.shape[1], kv_bound, ops)
    return PagedMemory(pool.rows, row_index(table, positions, pool.page_size), ops, seen)
