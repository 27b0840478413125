"""Qwen3, dense: the target.

Source: checkpoint keys `model.embed_tokens`, `model.layers.{i}.*`, `model.norm`, `lm_head`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanodflash import ops
from nanodflash.models.config import TargetConfig
from nanodflash.models.layers import Layer, Memory, Part, Rotary, layer_parts, run_layers, whole


class Qwen3(nn.Module):
    """The target: ids and positions in, hidden states and tapped features out."""

    rotary: Rotary
    table: ops.Ops

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.lm_head = (
            self.embed_tokens
            if config.tie_word_embeddings
            else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        )

    def parts(self) -> dict[str, Part]:
        """Checkpoint name -> the rows that hold it. A tied head has no name of its own."""
        named = {"model.embed_tokens.weight": whole(self.embed_tokens)}
        named |= layer_parts(self.layers, "model.")
        named["model.norm.weight"] = whole(self.norm)
        if not self.config.tie_word_embeddings:
            named["lm_head.weight"] = whole(self.lm_head)
        return named

    def prepare(self, length: int, table: ops.Ops = ops.REFERENCE) -> None:
        """Before the first forward: rotary tables for positions below `length`, the operations."""
        self.rotary, self.table = Rotary(self.config, length, self.embed_tokens), table

    def embed(self, ids: Tensor) -> Tensor:
        """Input rows [..., C] of `ids` [...]; the drafter's input rows are these too."""
        return F.embedding(ids, self.embed_tokens)

    def forward(
        self, ids: Tensor, positions: Tensor, memory: Memory, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run all layers.

        Args:
            ids, positions: [...] int64.
            taps: layers whose output (the residual stream after them, not normed) is recorded.
        Returns:
            hidden:   [..., C], after the final norm.
            features: [..., F*C], the taps in listed order along channels; None without taps.
        """
        rotary = self.rotary(positions)
        hidden, tapped = run_layers(
            self.layers, self.norm, self.embed(ids), rotary, memory, self.table, taps
        )
        return hidden, torch.cat(tapped, -1) if taps else None

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] of final hidden states [..., C]; the drafter's logits are made here too."""
        return F.linear(hidden, self.lm_head)
