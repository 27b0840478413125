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
from nanodflash.models.layers import Layer, Memory, Part, Rotary, Writer, layer_parts, whole


class DFlash(nn.Module):
    """The drafter: `inject` fills its memory with context, `forward` denoises one block."""

    rotary: Rotary

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

    def prepare(self, length: int) -> None:
        """Make the rotary table; positions past `max_position_embeddings` are clamped to it.

        What is drafted there is not counted (`DeviceState.draft_limit`), so it need only be safe.
        """
        self.rotary = Rotary(self.config, min(length, self.config.max_position_embeddings), self.fc)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary(positions.clamp(max=self.rotary.length - 1))

    def inject(self, features: Tensor, positions: Tensor, memory: Writer) -> None:
        """Write every layer's K/V rows for committed positions.

        Args:
            features:  [..., F*C], the target's taps.  positions: [...] int64, absolute.
        Source: dflash.md 1.4, 1.7: c = hidden_norm(fc(F)), the same for all layers.
        """
        c = ops.rms_norm(F.linear(features, self.fc), self.hidden_norm, self.config.rms_norm_eps)
        rotary = self._rotary(positions)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.inject(c, rotary, memory)

    def forward(self, embedded: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        """Hidden states [B, S, C] of a block; row j predicts the token at its own position.

        Args:
            embedded:  [B, S, C], the target's embeddings of the anchor and S-1 mask tokens.
            positions: [B, S] int64: len .. len+S-1.
        Source: dflash.md 1.5, block side.
        """
        rotary = self._rotary(positions)
        h = embedded
        for layer in self.layers:
            h = layer(h, rotary, memory)
        return ops.rms_norm(h, self.norm, self.config.rms_norm_eps)
