"""Acceptance and commit against the definition, on random rows."""

import random
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nanodflash.kernels import accept

from nanodflash import config as constants
from nanodflash import ops
from nanodflash.config import EngineConfig
from nanodflash.decoding import cycle, plan
from nanodflash.decoding import state as states

VOCAB, SEQS = 40, 30


def test_the_constants_are_the_engine_s() -> None:
    assert accept.ACTIVE.value == constants.ACTIVE
    assert accept.FINISHED.value == constants.FINISHED
    assert (accept.STOP.value, accept.BUDGET.value) == (constants.STOP, constants.BUDGET)
    assert accept.RECORD == plan.RECORD


def random_state(rng: random.Random, width: int, counted: bool) -> states.DeviceState:
    """Slots in every state, with budgets and limits around the block."""
    config = EngineConfig(max_model_len=64, block_size=max(width, 1), max_seqs=SEQS)
    state = states.DeviceState.allocate(config, torch.get_default_device())
    if counted:
        state.count_tokens(VOCAB)
        assert state.counts is not None
        state.counts += 3
    for slot in range(SEQS):
        state.len[slot] = length = rng.randrange(64)
        state.anchor[slot] = rng.randrange(VOCAB)
        state.budget[slot] = rng.choice([0, 1, 2, width, width + 1, 50])
        state.state[slot] = rng.choice(
            [constants.FREE, constants.ACTIVE, constants.ACTIVE, constants.FINISHED]
        )
        state.epoch[slot] = rng.randrange(1000)
        state.draft_limit[slot] = length + rng.choice([-3, 0, 1, 2, width, 100])
        state.tokens[slot] = torch.randint(0, VOCAB, state.tokens[slot].shape)
        stops = rng.sample(range(VOCAB), rng.choice([0, 1, 3, 16]))
        state.stop_ids[slot] = torch.tensor(stops + [-1] * (16 - len(stops)))
    return state


def snapshot(state: states.DeviceState) -> dict[str, Any]:
    values = {field.name: getattr(state, field.name) for field in fields(state)}
    return {name: value for name, value in values.items() if value is not None}


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("width", [1, 2, 5, 8, 16])
def test_commit(width: int, counted: bool) -> None:
    """Record and every tensor of the state, on twin states; padding rows name the spare slot."""
    rng = random.Random(width)
    torch.manual_seed(width)
    seen: set[int] = set()
    for seed in range(3):
        mine, theirs = (random_state(random.Random(seed), width, counted) for _ in range(2))
        theirs.tokens.copy_(mine.tokens)
        slots = torch.tensor([*rng.sample(range(SEQS), SEQS), SEQS, SEQS])
        tokens = torch.randint(0, VOCAB, (len(slots), width))
        tokens[-2:] = 0  # what the two padding rows write is the same
        block = torch.randint(0, VOCAB, (len(slots), 15))
        block[:, : width - 1] = tokens[:, : width - 1]
        wrong = torch.rand(len(slots), 15) < 0.15
        block = torch.where(wrong, (block + 1) % VOCAB, block)
        made = []
        for commit, state in ((ops.accept_commit, theirs), (accept.accept_commit, mine)):
            decoder: Any = SimpleNamespace(state=state, ops=SimpleNamespace(accept_commit=commit))
            made.append(cycle._commit(decoder, slots, block[:, : width - 1], tokens))
        wanted, got = made
        assert got.dtype == torch.int64
        assert got.tolist() == wanted.tolist()
        for name, value in snapshot(theirs).items():
            assert torch.equal(getattr(mine, name), value), name
        seen |= set(got[:, plan.FINISH].tolist())
    assert seen == {constants.RUNNING, constants.STOP, constants.BUDGET}
