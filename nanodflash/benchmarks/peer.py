"""The reference implementation, the PyPI package `dflash`, on the same weights."""

from collections.abc import Callable
from pathlib import Path

import torch


def dflash_generate(
    target: Path, draft: Path, stop_ids: list[int], max_new: int
) -> Callable[[list[int]], tuple[list[int], int]]:
    """A function that decodes prompt ids greedily with the reference, in fp32 on a CPU.

    Its own statistics need CUDA, so target forwards are counted by a hook.

    Returns:
        prompt ids -> (new ids, target forwards without prefill).
    Raises:
        ImportError: `dflash` or transformers is not installed (the `dev` extra).
    """
    from dflash.model import DFlashDraftModel
    from dflash.model import dflash_generate as reference
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    drafter = DFlashDraftModel.from_pretrained(draft, dtype=torch.float32).eval()
    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    model.register_forward_hook(count)

    def generate(prompt: list[int]) -> tuple[list[int], int]:
        nonlocal forwards
        forwards = 0
        ids = torch.tensor([prompt])
        output = reference(drafter, model, ids, max_new, stop_ids, temperature=0.0)
        return output[0, len(prompt) :].tolist(), forwards - 1

    return generate
