"""The target's own answers: what a drafter is trained on, made many rows at a time."""

import time
from collections.abc import Sequence

import torch

from nanodflash.config import EngineConfig, SamplingParams
from nanodflash.decoding.cycle import (
    EMITTED,
    FINISH,
    RECORD,
    RUNNING,
    Decoder,
    Facts,
    Span,
    commit_step,
    prefill_step,
    verify_step,
)
from nanodflash.models.qwen3 import Qwen3

ROWS, MAX_ANSWER, SAMPLED_ONE_IN = 64, 256, 7


def own_answers(
    target: Qwen3, prompts: Sequence[list[int]], stop_ids: Sequence[int], seed: int
) -> list[list[int]]:
    """Answer every prompt (ids), greedily but for one in seven at temperature 0.7.

    Returns:
        Ids in the order of the prompts, ended by a stop id; an answer that did not stop by itself
        is cut at `MAX_ANSWER`.
    """
    longest = max(map(len, prompts)) + MAX_ANSWER
    config = EngineConfig(max_model_len=longest, max_seqs=ROWS)
    decoder = Decoder(target, None, config)
    pages = config.pages_per_seq
    for slot in range(ROWS):  # every slot keeps its own pages throughout
        decoder.state.set_pages(slot, 0, range(1 + slot * pages, 1 + (slot + 1) * pages))
    tables = decoder.state.page_table.clone()

    answers: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    began = printed = time.monotonic()
    for first in range(0, len(order), ROWS):
        members = order[first : first + ROWS]
        for slot, i in enumerate(members):
            warm = 0.7 if i % SAMPLED_ONE_IN == 0 else 0.0
            decoder.state.admit(
                slot,
                prompts[i],
                SamplingParams(temperature=warm),
                budget=MAX_ANSWER,
                seed=seed + i,
                stop_ids=stop_ids,
                epoch=i,
                draft_limit=0,
            )
        decoder.state.page_table.copy_(tables)
        spans = [Span(slot, 0, len(prompts[i]), True) for slot, i in enumerate(members)]
        rows, bound = list(range(len(members))), len(prompts[members[-1]])
        facts = Facts(1, "sampled", False, bound)
        record = prefill_step(decoder, spans, torch.tensor(rows), facts)
        assert record is not None
        records = record.tolist()
        while rows:
            for slot, record in zip(rows, records, strict=True):
                answers[members[slot]] += record[RECORD : RECORD + record[EMITTED]]
            rows = [slot for slot, r in zip(rows, records, strict=True) if r[FINISH] == RUNNING]
            bound += 1
            if rows:
                slots, facts = torch.tensor(rows), Facts(1, "sampled", False, bound)
                verified = verify_step(decoder, slots, None, facts)
                records = commit_step(decoder, slots, verified).tolist()
        if time.monotonic() - printed > 10:
            printed = time.monotonic()
            made, tokens = first + len(members), sum(map(len, answers))
            rate = tokens / (printed - began)
            print(f"{made}/{len(order)} answers  {tokens} tokens  {rate:,.0f}/s", flush=True)
    return answers
