"""What is known about every slot, on the device.

The steps read and write these tensors; the host sends admissions and page-table rows and keeps a
mirror that lags. The last slot is the spare one: padding rows of a batch name it, it is never
active.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanodflash.config import MAX_STOP_IDS, EngineConfig, SamplingParams

FREE, ACTIVE, FINISHED = 0, 1, 2


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
        temperature, top_p, min_p: [slots] fp32.  top_k, seed.
        stop_ids:    [slots, 16], padded with -1.
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
    stop_ids: Tensor

    @classmethod
    def allocate(cls, config: EngineConfig, device: torch.device) -> "DeviceState":
        """All slots free, every page table row the dummy page."""
        slots = config.max_seqs + 1

        def whole(*shape: int) -> Tensor:
            return torch.zeros(slots, *shape, dtype=torch.int64, device=device)

        def real() -> Tensor:
            return torch.zeros(slots, dtype=torch.float32, device=device)

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
            stop_ids=whole(MAX_STOP_IDS),
        )

    def admit(
        self,
        slot: int,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        budget: int,
        seed: int,
        stop_ids: Sequence[int],
        epoch: int,
        draft_limit: int,
    ) -> None:
        """Give a slot to a request: every per-slot value is written, none survives from before.

        The row stays inert until its prompt is in the cache: `prefill_step` makes it ACTIVE.
        """
        self.len[slot] = len(prompt) - 1
        self.anchor[slot] = prompt[-1]
        self.budget[slot] = budget
        self.state[slot] = FREE
        self.epoch[slot] = epoch
        self.prompt_len[slot] = len(prompt)
        self.draft_limit[slot] = draft_limit
        self.page_table[slot] = 0
        self.tokens[slot, : len(prompt)] = torch.tensor(prompt)
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = seed
        padded = [*stop_ids, *[-1] * (MAX_STOP_IDS - len(stop_ids))]
        self.stop_ids[slot] = torch.tensor(padded)

    def set_pages(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Write page ids into a slot's table from column `first` on."""
        self.page_table[slot, first : first + len(pages)] = torch.tensor(pages, dtype=torch.int64)

    def release(self, slot: int) -> None:
        """Make a slot inert: nothing it names is written any more."""
        self.state[slot] = FREE
        self.page_table[slot] = 0
