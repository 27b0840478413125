"""DFlash v1: the block-diffusion drafter.

It sees the committed history only through K/V rows injected from the target's features, and
fills a whole block in one forward. Embedding and head are the target's.

Source: DFlash (arXiv 2602.06036); checkpoint keys `fc`, `hidden_norm`, `layers.{i}.*`, `norm`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanodflash import ops
from nanodflash.models.config import DraftConfig
from nanodflash.models.layers import (
    Layer,
    Memory,
    Part,
    Rotary,
    Writer,
    layer_parts,
    run_layers,
    whole,
)


class DFlash(nn.Module):
    """The drafter: `inject` fills its memory with context, `forward` denoises one block."""

    rotary: Rotary
    table: ops.Ops
    context: tuple[Tensor, Tensor] | None = None

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        hidden, tapped = config.hidden_size, len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Parameter(torch.empty(hidden, tapped))
        self.hidden_norm = nn.Parameter(torch.ones(hidden))
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(hidden))

    def parts(self) -> dict[str, Part]:
        """Checkpoint name -> the rows that hold it."""
        named = {"fc.weight": whole(self.fc), "hidden_norm.weight": whole(self.hidden_norm)}
        named |= layer_parts(self.layers)
        return named | {"norm.weight": whole(self.norm)}

    def prepare(self, length: int, table: ops.Ops = ops.REFERENCE) -> None:
        """Rotary tables, the operations. Positions past `max_position_embeddings` are clamped.

        What is drafted there is not counted (`DeviceState.draft_limit`), so it need only be safe.
        """
        length = min(length, self.config.max_position_embeddings)
        self.rotary, self.table = Rotary(self.config, length, self.fc), table

    def freeze(self) -> None:
        """Once the weights will not change: keep the context side's of all layers as one matrix."""
        with torch.no_grad():
            self.context = self._context()

    def _context(self) -> tuple[Tensor, Tensor]:
        """[L * 2 Hkv * D, C], in the layout that the layers' own have, and key norms [L, D]."""
        layers = [layer for layer in self.layers if isinstance(layer, Layer)]
        parts = [layer.qkv_proj[-2 * layer.kv_rows :] for layer in layers]
        by_rows = parts[0].is_contiguous()
        weight = torch.cat(parts) if by_rows else torch.cat([part.t() for part in parts], 1).t()
        return weight, torch.stack([layer.k_norm for layer in layers])

    def _rotary(self, positions: Tensor) -> ops.Rotary:
        return self.rotary(positions.clamp(max=self.rotary.length - 1))

    def inject(self, features: Tensor, positions: Tensor, memory: Writer) -> None:
        """Write every layer's K/V rows for committed positions; no input_layernorm here.

        Args:
            features:  [..., F*C], the target's taps.  positions: [...] int64, absolute.
        Source: dflash.md 1.4, 1.5 (context side), 1.7: c = hidden_norm(fc(F)), for all layers.
        """
        eps, dim = self.config.rms_norm_eps, self.config.head_dim
        c = self.table.rms_norm(F.linear(features, self.fc), self.hidden_norm, eps)
        weight, norms = self.context or self._context()
        kv = F.linear(c, weight).unflatten(-1, (len(self.layers), -1, dim))
        memory.inject(kv, norms, eps, self._rotary(positions))

    def forward(self, embedded: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        """Hidden states [B, S, C] of a block; row j predicts the token at its own position.

        Args:
            embedded:  [B, S, C], the target's embeddings of the anchor and S-1 mask tokens.
            positions: [B, S] int64: len .. len+S-1.
        Source: dflash.md 1.5, block side.
        """
        rotary = self._rotary(positions)
        return run_layers(self.layers, self.norm, embedded, rotary, memory, self.table)[0]
