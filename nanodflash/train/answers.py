"""The target's own answers: what a drafter is trained on."""

from collections.abc import Sequence

from nanodflash.config import SamplingParams
from nanodflash.llm import LLM

ROWS, MAX_ANSWER, SAMPLED_ONE_IN = 64, 256, 7


def own_answers(target: str, prompts: Sequence[list[int]], seed: int) -> list[list[int]]:
    """Answer every prompt (ids), greedily but for one in seven at temperature 0.7.

    Args:
        target: folder or hub id.
    Returns:
        Ids in the order of the prompts, ended by a stop id; an answer that did not stop by itself
        is cut at `MAX_ANSWER`.
    """
    params = [
        SamplingParams(MAX_ANSWER, temperature=0.0 if i % SAMPLED_ONE_IN else 0.7, seed=seed + i)
        for i in range(len(prompts))
    ]
    longest = max(map(len, prompts)) + MAX_ANSWER
    with LLM(target, None, device="cpu", dtype="fp32", max_seqs=ROWS, max_model_len=longest) as llm:
        return [output.token_ids for output in llm.generate(prompts, params, progress=True)]
