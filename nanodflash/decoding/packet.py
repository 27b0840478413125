"""A plan as one row of int64: a single copy brings all of it to the device.

Sections, in order: slots of the rows; of the spans that end a prompt; of those of them that choose
a first token; page deltas (slots, columns, pages); one row of values an admission; the ids of
the admissions, end to end. Sizes follow from the plan, which both sides know.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nanodflash.config import FREE, MAX_BIASES, MAX_STOP_IDS
from nanodflash.decoding.plan import Admission, StepPlan
from nanodflash.decoding.state import DeviceState

# What an admission sets, in the order of its row; the reals travel as the bits of fp64.
INTS = (
    *("len", "anchor", "budget", "state", "epoch", "prompt_len", "draft_limit", "top_k", "seed"),
    *("min_new", "stop_ids", "bias_ids", "page_table"),
)
REALS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency", "bias")


NOTHING = [np.empty(0, np.int64)] * 7  # of all sections but the rows


def pack(plan: StepPlan, pages_per_seq: int) -> list[np.ndarray]:
    """The sections of a plan, each [n] int64."""
    rows = np.array(plan.rows, np.int64)
    if not (plan.spans or plan.deltas or plan.admissions):  # most steps
        return [rows, *NOTHING]
    ready = [span for span in plan.spans if span.last]
    pages = [len(delta.pages) for delta in plan.deltas]
    columns = [range(delta.first, delta.first + len(delta.pages)) for delta in plan.deltas]
    sections: list[Sequence[int]] = [
        [span.slot for span in ready],
        [span.slot for span in ready if not span.resumed],
        [delta.slot for delta, count in zip(plan.deltas, pages, strict=True) for _ in range(count)],
        [column for some in columns for column in some],
        [page for delta in plan.deltas for page in delta.pages],
    ]
    admissions = [_values(admission, pages_per_seq) for admission in plan.admissions]
    ids = [np.asarray(admission.ids, np.int64) for admission in plan.admissions]
    return [
        rows,
        *(np.array(section, np.int64) for section in sections),
        np.concatenate(admissions) if admissions else np.empty(0, np.int64),
        np.concatenate(ids) if ids else np.empty(0, np.int64),
    ]


def _values(admission: Admission, pages_per_seq: int) -> np.ndarray:
    """Everything of a slot but its ids."""
    ids, params = admission.ids, admission.params
    biased, biases = zip(*params.logit_bias, strict=True) if params.logit_bias else ((), ())
    ints = [
        admission.slot,
        *(len(ids) - 1, ids[-1], admission.budget, FREE, admission.epoch, admission.prompt_len),
        *(admission.draft_limit, params.top_k, admission.seed, params.min_new_tokens),
        *_padded(admission.stop_ids, MAX_STOP_IDS, -1),
        *_padded(biased, MAX_BIASES, 0),
        *_padded(admission.pages, pages_per_seq, 0),
    ]
    reals = [
        *(params.temperature, params.top_p, params.min_p, params.repetition_penalty),
        *(params.presence_penalty, params.frequency_penalty, *_padded(biases, MAX_BIASES, 0)),
    ]
    return np.concatenate([np.array(ints, np.int64), np.array(reals, np.float64).view(np.int64)])


def _padded(values: Sequence[float], length: int, filler: int) -> list[float]:
    return [*values, *[filler] * (length - len(values))]


def apply(plan: StepPlan, sections: Sequence[Tensor], state: DeviceState) -> None:
    """Admissions and page deltas, on the device. A slot keeps nothing of who had it before.

    An admitted row stays inert until its prompt is in the cache: `prefill_step` makes it ACTIVE.
    With the first token, or with the anchor it had before a preemption, `len` is then right.
    """
    _, _, _, slots, columns, pages, values, ids = sections
    if plan.admissions:
        admit(plan.admissions, values.view(len(plan.admissions), -1), ids, state)
    if plan.deltas:
        state.page_table.index_put_((slots, columns), pages)


def admit(admissions: Sequence[Admission], values: Tensor, ids: Tensor, state: DeviceState) -> None:
    """Write the rows of admissions, values [A, 1 + ...] behind their slot, and their ids."""
    slots, rows = values[:, 0], len(state.len)
    wide = [(name, getattr(state, name).view(rows, -1)) for name in (*INTS, *REALS)]
    parts = values[:, 1:].split([tensor.shape[1] for _, tensor in wide], 1)
    for (name, tensor), part in zip(wide, parts, strict=True):
        given = part if name in INTS else part.view(torch.float64).to(tensor.dtype)
        tensor.index_copy_(0, slots, given)
    done = 0
    for admission in admissions:
        slot, count = admission.slot, len(admission.ids)
        state.tokens[slot, :count].copy_(ids[done : done + count])
        done += count
        state.count_ids(slot, admission.prompt_len, count)
