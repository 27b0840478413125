"""What is proposed at temperature: the drafter's best where it is sure, coupled elsewhere."""

import torch

import kit
from nanodflash.config import EngineConfig, SamplingParams
from nanodflash.decoding.sampling import SURE, choose, propose
from nanodflash.decoding.state import DeviceState
from nanodflash.ops import REFERENCE

VOCAB, ROWS = 50, 200


def test_best_where_sure_and_coupled_elsewhere() -> None:
    config = EngineConfig(max_model_len=ROWS + 8, max_seqs=1)
    state = DeviceState.allocate(config, torch.device("cpu"))
    kit.admit(state, 0, [1, 2], SamplingParams(temperature=1.3), budget=9, draft_limit=99, seed=5)
    logits = torch.randn(1, ROWS, VOCAB, dtype=torch.float64) * torch.linspace(0, 4, ROWS)[:, None]
    slots, positions = torch.tensor([0]), torch.arange(ROWS)[None]
    given = (REFERENCE, logits, state, slots, positions)
    proposals, coupled = propose(*given), choose(*given)
    best, sure = logits.argmax(-1), logits.softmax(-1).amax(-1) > SURE
    assert proposals[sure].equal(best[sure])
    assert proposals[~sure].equal(coupled[~sure])
    assert not coupled[sure].equal(best[sure])  # both kinds of row tell them apart
    assert not coupled[~sure].equal(best[~sure])
