"""The law of sampled text is the target's own, whatever is proposed.

Six tokens, three new ones: 216 texts, whose exact probabilities follow from the target's softmax
by enumeration. 20,000 seeds run as the rows of a batch.
"""

import itertools
import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

import kit
import oracle
from kit import make_draft, make_target
from nanodflash import SamplingParams
from nanodflash.config import ACTIVE, EngineConfig
from nanodflash.decoding import cycle
from nanodflash.decoding.cycle import Decoder, commit_step, draft_step, verify_step
from nanodflash.decoding.plan import ACCEPTED, Facts, Span

V, NEW, SIZE, SEEDS, CHUNK = 6, 3, 4, 20_000, 4_000
PROMPT = [2, 5, 1]
SHAPE = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 4,
}
TAPS = {"num_target_layers": 1, "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0]}}
SAMPLINGS = {
    "T=1": SamplingParams(temperature=1.0),
    "T=0.7, top_p=0.8": SamplingParams(temperature=0.7, top_p=0.8),
    "T=2, top_k=4, min_p=0.1": SamplingParams(temperature=2.0, top_k=4, min_p=0.1),
}


@cache
def exact(name: str) -> Tensor:
    """Probability of each of the 216 texts, [6, 6, 6]."""
    params, target = SAMPLINGS[name], make_target(**SHAPE)
    target.prepare(16)

    def conditional(prefix: tuple[int, ...]) -> list[float]:
        ids = torch.tensor([*PROMPT, *prefix])
        with torch.no_grad():
            hidden, _ = target(ids, torch.arange(len(ids)), oracle.Causal())
            scaled = (target.logits(hidden[-1]) / params.temperature).tolist()
        keep = oracle.allowed(scaled, params)
        weights = [math.exp(x) * kept for x, kept in zip(scaled, keep, strict=True)]
        return [weight / sum(weights) for weight in weights]

    after = {
        prefix: conditional(prefix)
        for length in range(NEW)
        for prefix in itertools.product(range(V), repeat=length)
    }
    cells = [
        math.prod(after[text[:place]][text[place]] for place in range(NEW))
        for text in itertools.product(range(V), repeat=NEW)
    ]
    return torch.tensor(cells, dtype=torch.float64).view(V, V, V)


def chi_square_p(counts: Tensor, expected: Tensor) -> float:
    """The share of samples that lie as far from what is expected; rare cells are put together."""
    rare = expected < 5
    pairs = torch.stack((counts[~rare], expected[~rare]), 1)
    if expected[rare].sum() > 0:
        pooled = torch.stack((counts[rare].sum(), expected[rare].sum()))
        pairs = torch.cat((pairs, pooled[None]))
    statistic = ((pairs[:, 0] - pairs[:, 1]).square() / pairs[:, 1]).sum()
    freedom = torch.tensor((len(pairs) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


def problems(texts: Tensor, law: Tensor) -> list[str]:
    """What of [seeds, 3] texts speaks against the law."""
    places = (texts * torch.tensor([V * V, V, 1])).sum(1)
    counts = torch.bincount(places, minlength=V**NEW).view(V, V, V).double()
    found = []
    if counts[law == 0].sum() > 0:
        found.append(f"{int(counts[law == 0].sum())} texts in forbidden cells")
    for place in range(NEW):
        others = [i for i in range(NEW) if i != place]
        distance = 0.5 * (counts.sum(others) / len(texts) - law.sum(others)).abs().sum()
        if distance >= 0.02:
            found.append(f"total variation {distance:.4f} of the marginal at {place}")
    if (p := chi_square_p(counts.flatten(), law.flatten() * len(texts))) <= 1e-4:
        found.append(f"chi-square p = {p:.2g}")
    return found


def sample(name: str, width: int, proposals: Tensor | None = None) -> tuple[Tensor, float]:
    """Texts [20000, 3] of seeds 0 .. 19999 by the steps, and proposals kept per text.

    Args:
        proposals: [20000, 3]; else the drafter's.
    """
    places: list[slice] = []  # of the seeds in the batch that runs

    def script(tokens: Tensor, length: Tensor) -> Tensor:
        assert proposals is not None
        padded = torch.cat((proposals[places[-1]], torch.zeros(CHUNK, SIZE).long()), 1)
        return padded.gather(1, length[:, None] + 1 - len(PROMPT) + torch.arange(SIZE - 1))

    config = EngineConfig(max_model_len=6, block_size=SIZE, page_size=10, max_seqs=CHUNK)
    decoder = Decoder(
        make_target(**SHAPE),
        make_draft(**SHAPE, **TAPS),
        config,
        None if proposals is None else script,
    )
    texts, accepted = [], 0
    for first in range(0, SEEDS, CHUNK):
        places.append(slice(first, first + CHUNK))
        slots = admit(decoder, name, first)
        while decoder.state.budget.any():
            facts = Facts(width, "sampled", True, 10)
            proposed = draft_step(decoder, slots, facts) if width > 1 else None
            record, _ = commit_step(decoder, slots, verify_step(decoder, slots, proposed, facts))
            accepted += int(record[:, ACCEPTED].sum())
        texts.append(decoder.state.tokens[:CHUNK, len(PROMPT) : len(PROMPT) + NEW].clone())
    return torch.cat(texts), accepted / SEEDS


def admit(decoder: Decoder, name: str, first: int) -> Tensor:
    """The same prompt in every slot, seeds first, first + 1, ...; prefilled once and copied."""
    state, slots = decoder.state, torch.arange(CHUNK)
    kit.admit(state, 0, PROMPT, SAMPLINGS[name], budget=NEW, draft_limit=6, pages=[1])
    facts = Facts(1, "sampled", True, 10)
    kit.prefill(decoder, [Span(0, 0, len(PROMPT), last=False)], facts)
    assert decoder.draft_pool is not None
    for pool in (decoder.target_pool, decoder.draft_pool):
        pool.rows[:, 2:] = pool.rows[:, 1:2].clone()
    for tensor in filter(torch.is_tensor, vars(state).values()):
        tensor[1:CHUNK] = tensor[0].clone()
    state.page_table[:CHUNK, 0] = slots + 1
    state.seed[:CHUNK] = slots + first
    state.state[:CHUNK] = ACTIVE
    return slots


@cache
def plain(name: str) -> Tensor:
    """What the target alone samples."""
    return sample(name, width=1)[0]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_test_of_the_law(name: str) -> None:
    """Texts drawn from the law pass; those of a law a little off do not."""
    law, generator = exact(name), torch.Generator().manual_seed(0)
    assert law.sum().item() == pytest.approx(1)
    assert (name == "T=1") == bool((law > 0).all())

    def draw(weights: Tensor) -> Tensor:
        cells = torch.multinomial(weights.flatten(), SEEDS, True, generator=generator)
        return torch.stack((cells // V**2, cells // V % V, cells % V), 1)

    assert not problems(draw(law), law)
    sharper = law**1.15
    assert problems(draw(sharper), law)
    forbidden = draw(law)
    if (law == 0).any():
        forbidden[0] = (law == 0).nonzero()[0]
        assert "1 texts in forbidden cells" in problems(forbidden, law)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_plain_sampling_follows_the_law(name: str) -> None:
    assert not problems(plain(name), exact(name))


def argmax(_: object, logits: Tensor, *__: object) -> Tensor:
    return logits.argmax(-1)


PROPOSALS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "coupled": lambda text: None,
    "argmax": lambda text: None,
    "right, wrong, right": lambda text: (text + torch.tensor([0, 1, 0])) % V,
    "wrong": lambda text: (text + 1) % V,
}


@pytest.mark.parametrize("proposer", PROPOSALS)
@pytest.mark.parametrize("name", [*SAMPLINGS][:2])
def test_any_draft_follows_the_law(
    name: str, proposer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if proposer == "argmax":
        monkeypatch.setattr(cycle, "propose", argmax)
    texts, accepted = sample(name, SIZE, PROPOSALS[proposer](plain(name)))
    assert not problems(texts, exact(name))
    assert torch.equal(texts, plain(name)), "fp64: the same seed is the same text"
    least, most = {"wrong": (0, 0), "right, wrong, right": (2, 2)}.get(proposer, (0.1, NEW - 0.1))
    assert least <= accepted <= most
