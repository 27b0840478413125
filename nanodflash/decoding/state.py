"""What is known about every slot, on the device.

The steps read and write these tensors; the host sends admissions and page-table rows and keeps a
mirror that lags. The last slot is the spare one: padding rows of a batch name it, it is never
active.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanodflash.config import FREE, MAX_BIASES, MAX_STOP_IDS, EngineConfig


@dataclass
class DeviceState:
    """Per-slot tensors; `[slots]` int64 where nothing else is said.

    Attributes:
        len:         committed tokens whose target K/V is valid; the anchor's position.
        anchor:      the last emitted token; its K/V is not written yet.
        budget:      tokens still allowed.
        state:       FREE, ACTIVE or FINISHED. Only ACTIVE rows emit or write to their pages.
        epoch:       which request has the slot; copied into every record.
        prompt_len:  prompt tokens.
        draft_limit: first position at which proposals are no longer counted.
        page_table:  [slots, pages_per_seq] page ids; 0 is the dummy page.
        tokens:      [slots, max_model_len + S], prompt and emitted ids.
        temperature, top_p, min_p, repetition, presence, frequency: [slots] fp32.  top_k, seed.
        min_new:     tokens before which stop ids cannot be chosen.
        stop_ids:    [slots, 16], padded with -1.
        bias_ids, bias: [slots, 64], padded with id 0 and 0.0.
        counts:      [slots, V] int32, how often the output holds each id; None until a request
                     needs the "full" sampler.
        in_prompt:   [slots, V] bool, likewise.
    """

    len: Tensor
    anchor: Tensor
    budget: Tensor
    state: Tensor
    epoch: Tensor
    prompt_len: Tensor
    draft_limit: Tensor
    page_table: Tensor
    tokens: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    min_new: Tensor
    stop_ids: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    bias_ids: Tensor
    bias: Tensor
    counts: Tensor | None = None
    in_prompt: Tensor | None = None

    @classmethod
    def allocate(cls, config: EngineConfig, device: torch.device) -> "DeviceState":
        """All slots free, every page table row the dummy page."""
        slots = config.max_seqs + 1

        def whole(*shape: int) -> Tensor:
            return torch.zeros(slots, *shape, dtype=torch.int64, device=device)

        def real(*shape: int) -> Tensor:
            return torch.zeros(slots, *shape, dtype=torch.float32, device=device)

        return cls(
            len=whole(),
            anchor=whole(),
            budget=whole(),
            state=whole(),
            epoch=whole(),
            prompt_len=whole(),
            draft_limit=whole(),
            page_table=whole(config.pages_per_seq),
            tokens=whole(config.max_model_len + config.block_size),
            temperature=real(),
            top_k=whole(),
            top_p=real(),
            min_p=real(),
            seed=whole(),
            min_new=whole(),
            stop_ids=whole(MAX_STOP_IDS),
            repetition=real(),
            presence=real(),
            frequency=real(),
            bias_ids=whole(MAX_BIASES),
            bias=real(MAX_BIASES),
        )

    def count_tokens(self, vocab_size: int) -> None:
        """Allocate the tables of penalties, once; V entries a slot."""
        if self.counts is None:
            slots, device = len(self.len), self.len.device
            self.counts = torch.zeros(slots, vocab_size, dtype=torch.int32, device=device)
            self.in_prompt = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device)

    def count_ids(self, slot: int, prompt_len: int, length: int) -> None:
        """Fill a slot's tables of penalties from its first `length` ids, where there are any."""
        if self.counts is not None and self.in_prompt is not None:
            output = self.tokens[slot, prompt_len:length]
            self.counts[slot].zero_().index_add_(
                0, output, torch.ones_like(output, dtype=torch.int32)
            )
            self.in_prompt[slot].zero_().index_fill_(0, self.tokens[slot, :prompt_len], True)

    def forget(self, slots: Sequence[int]) -> None:
        """Make slots inert: what later steps do for them goes to the dummy page and emits nothing.

        After a step that failed, whose admissions may not have come through.
        """
        for slot in slots:
            self.state[slot] = FREE
            self.page_table[slot] = 0
