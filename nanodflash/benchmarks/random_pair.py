"""Random models in the public shape on a device, and engines for them; acceptance is scripted."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanodflash import ops
from nanodflash.config import EngineConfig, SamplingParams
from nanodflash.decoding.cycle import Decoder, Proposer
from nanodflash.engine import sequence as host
from nanodflash.engine.engine import Engine
from nanodflash.engine.steps import ModelSteps
from nanodflash.engine.streams import Stream, open_stream
from nanodflash.engine.width import VerifyWidth
from nanodflash.models.config import DraftConfig, TargetConfig
from nanodflash.models.dflash import DFlash
from nanodflash.models.qwen3 import Qwen3

ACCEPT = 0.857  # chance that a proposal is right: 6.4 tokens a cycle, as published

TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
DRAFT: dict[str, Any] = TARGET | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}


@dataclass
class Bench:
    """Random models on a device, and engines for them, one at a time.

    Args:
        batch, context: the most requests and the longest context of any part.
    """

    device: torch.device
    dtype: torch.dtype
    target: dict[str, Any]
    draft: dict[str, Any]
    batch: int
    context: int
    new_tokens: int = 1000

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        target, draft = TargetConfig.from_dict(self.target), DraftConfig.from_dict(self.draft)
        with torch.device(self.device):
            self.models = (Qwen3(target).to(self.dtype), DFlash(draft).to(self.dtype))
        for model in self.models:
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.data.normal_(std=0.02)
                parameter.requires_grad_(False)
        self.models[0].embed_tokens.data.normal_()  # at 0.02 a text repeats one id
        self.config = EngineConfig(
            max_model_len=self.context + self.new_tokens + 64,
            block_size=draft.block_size,
            max_seqs=self.batch,
            max_prefill=4096 + self.batch * draft.block_size,
            prefix_cache=False,
        )
        self.table = ops.kernel_ops() if self.device.type == "cuda" else ops.REFERENCE
        self._decoder: Decoder | None = None

    def decoder(self, table: ops.Ops, proposer: Proposer | None = None) -> Decoder:
        """With these operations; the one before it is gone."""
        self._decoder = None
        gc.collect()
        self._decoder = Decoder(*self.models, self.config, proposer, table)
        return self._decoder

    def engine(
        self,
        decoder: Decoder,
        graphs: bool = True,
        overlap: bool = True,
        width: int | None = 0,
        ahead: Sequence[int] = (),
    ) -> Engine:
        """An engine of its own on the same decoder.

        Args:
            width: rows that are verified; None measures, 0 is the whole block.
            ahead: widths that are captured before anything is served.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # what made the models was on another stream

        def make(stream: Stream) -> ModelSteps:
            capture = stream.capture if self.device.type == "cuda" else None
            steps = ModelSteps(decoder, graphs, capture)
            if ahead:
                steps.prepare(self.config.max_seqs, self.config.max_prefill, ahead)
            return steps

        limit = self.config.max_model_len
        stream = lambda: open_stream(self.device, overlap)  # noqa: E731
        policy = VerifyWidth(
            self.config.block_size, self.config.block_size if width == 0 else width
        )
        return Engine(make, stream, self.config, limit, True, overlap, None, policy)

    def request(
        self, length: int, new: int, speculate: bool = True, seed: int = 0
    ) -> host.Sequence:
        """A prompt of random ids."""
        generator = torch.Generator().manual_seed(seed)
        vocab = self.models[0].config.vocab_size
        prompt = torch.randint(0, vocab, (length,), generator=generator).tolist()
        params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        return host.Sequence(prompt, params, new, 0, [], speculate, None)

    def scripted(self) -> ops.Ops:
        """Operations that accept as the public drafter does."""
        size, table = self.config.block_size, self.table
        generator = torch.Generator().manual_seed(1)
        right = torch.rand(4096, size - 1, generator=generator) < ACCEPT
        runs = right.long().cumprod(1).sum(1).to(self.device)
        places = torch.arange(size - 1, device=self.device)

        def accept_commit(
            slots: Tensor, proposals: Tensor, tokens: Tensor, length: Tensor, *rest: Any
        ) -> Tensor:
            width = proposals.shape[1]
            if width:
                run = runs[(length[slots] * 31 + slots * 7) % len(runs)]
                head = torch.where(places[:width] < run[:, None], proposals, tokens[:, :width])
                wrong = (proposals == tokens[:, :width]) & (places[:width] >= run[:, None])
                head = torch.where(wrong, (head + 1) % 1000, head)
                tokens = torch.cat((head, tokens[:, width:]), 1)
            return table.accept_commit(slots, proposals, tokens, length, *rest)

        return replace(table, accept_commit=accept_commit)
