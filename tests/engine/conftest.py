"""A tiny pair on disk, the oracle's text for it, and engines whose proposals can be scripted."""

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor

import kit
import oracle
from nanodflash import LLM, SamplingParams
from nanodflash.checkpoint import load_model, open_checkpoint, save_model
from nanodflash.models.config import TargetConfig
from nanodflash.models.qwen3 import Qwen3

LIMIT = 256
# Tests whose engine is made by these run with one thread and with overlap.
ENGINES = ("open_llm", "scripted")
TARGET = {"num_hidden_layers": 3, "intermediate_size": 64, "max_position_embeddings": LIMIT}
DRAFT = {
    "num_target_layers": 3,
    "intermediate_size": 64,
    "max_position_embeddings": LIMIT,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 319, "target_layer_ids": [0, 2]},
}
EOS = [301, 302]  # ids of the worded model's generation_config.json; words are ids below 300


class Pair:
    """Folders of the tiny pair, and of the same weights with other files beside them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.target, self.draft, self.worded = root / "target", root / "draft", root / "worded"
        save_model(self.target, kit.make_target(**TARGET), kit.TARGET | TARGET)
        save_model(self.draft, kit.make_draft(**DRAFT), kit.DRAFT | DRAFT)
        self.variant(self.target, "worded", eos_token_id=5)
        save_words(self.worded)

    def variant(self, base: Path, name: str, weights: bool = True, **changes: Any) -> Path:
        """A copy of a folder with changed config keys."""
        folder = self.root / name
        if not folder.exists():
            shutil.copytree(base, folder)
            config = json.loads((base / "config.json").read_text()) | changes
            (folder / "config.json").write_text(json.dumps(config))
            if not weights:
                (folder / "model.safetensors").unlink()
        return folder


def save_words(folder: Path) -> None:
    """A tokenizer of 300 words written without spaces, a template, and two end ids."""
    words = {f"{chr(97 + i % 26)}{i // 26}": i for i in range(300)}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="a0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m.content }} {% endfor %}{{ 'z1' if enable_thinking else 'z2' }}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


class Oracle:
    """The oracle's text for a prompt, kept: a longer one goes on from a shorter one."""

    def __init__(self, folder: Path) -> None:
        checkpoint = open_checkpoint(str(folder))
        config = TargetConfig.from_dict(checkpoint.config)
        self.target = load_model(Qwen3, config, checkpoint, "cpu", torch.float64)
        self.target.prepare(2 * LIMIT)
        self._known: dict[Any, list[int]] = {}

    def ids(self, prompt: Sequence[int], params: SamplingParams, count: int) -> list[int]:
        """The first `count` new ids, whatever stops them."""
        asked = dataclasses.replace(params, max_new_tokens=1, stop_token_ids=(), stop=())
        known = self._known.setdefault((tuple(prompt), asked), [])
        if len(known) < count:
            more = dataclasses.replace(asked, max_new_tokens=count - len(known))
            known += oracle.decode(self.target, [*prompt, *known], more)[0]
        return known[:count]

    def __call__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        eos: Sequence[int] = (),
        limit: int = LIMIT,
    ) -> tuple[list[int], str]:
        """New ids and the finish reason: `oracle.decode`, from what is known."""
        ids = self.ids(prompt, params, min(params.max_new_tokens, limit - len(prompt)))
        for place, token in enumerate(ids):
            if token in params.stop_token_ids or token in eos:
                return ids[: place + 1], "stop"
        return ids, "length"

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """[len(ids), V]: row i is what token i + 1 is chosen from."""
        hidden, _ = self.target(torch.tensor(ids), torch.arange(len(ids)), oracle.Causal())
        return self.target.logits(hidden)


@pytest.fixture(scope="session")
def expect(pair: Pair) -> Oracle:
    return Oracle(pair.target)


class Scripted:
    """An LLM whose proposals are scripted anew for every request. The drafter runs, unheard."""

    def __init__(self, pair: Pair, expect: Oracle, size: int, **options: Any) -> None:
        self.expect, self.size, self.fails_at, self.calls = expect, size, None, 0
        options = {"draft": pair.draft, "dtype": "fp64"} | options
        self.llm = LLM(
            options.pop("model", pair.target), block_size=size, proposer=self._propose, **options
        )

    def _propose(self, tokens: Tensor, length: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("scripted failure")
        return self.script(tokens, length)

    def prepare(self, prompt: Sequence[int], params: SamplingParams, pattern: str) -> None:
        """Propose the oracle's text, spoiled by the pattern, from now on; past the budget too."""
        room = self.llm.config.max_model_len - len(prompt)
        count = min(params.max_new_tokens, room) + self.size
        text = [*prompt, *self.expect.ids(prompt, params, count)]
        self.script, self.calls = kit.Script(text, self.size, pattern), 0

    def run(self, prompt: Sequence[int], params: SamplingParams, pattern: str = "right") -> Any:
        """One request under a script."""
        self.prepare(prompt, params, pattern)
        return self.llm.generate(prompt, params)[0]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every scenario twice: one thread, and two steps ahead."""
    if set(ENGINES) & set(metafunc.fixturenames):
        ids = ["one thread", "overlap"]
        metafunc.parametrize("overlap", [False, True], ids=ids, indirect=True, scope="module")


@pytest.fixture(scope="module")
def overlap(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def scripted(pair: Pair, expect: Oracle, overlap: bool) -> Iterator[Callable[..., Scripted]]:
    """Makes one `Scripted` for each set of options, kept for the module."""
    made: dict[Any, Scripted] = {}

    def make(size: int, **options: Any) -> Scripted:
        key = (size, *sorted((name, str(value)) for name, value in options.items()))
        if key not in made:
            made[key] = Scripted(pair, expect, size, **{"overlap": overlap} | options)
        return made[key]

    yield make
    for one in made.values():
        one.llm.close()


@pytest.fixture
def open_llm(pair: Pair, overlap: bool) -> Iterator[Callable[..., LLM]]:
    """An LLM of the tiny pair in fp64; pages must all be free when the test ends."""
    opened: list[LLM] = []

    def make(model: Any = None, draft: Any = None, **options: Any) -> LLM:
        options = {"dtype": "fp64", "overlap": overlap} | options
        opened.append(LLM(model or pair.target, draft or pair.draft, **options))
        return opened[-1]

    yield make
    for llm in opened:
        check_no_leak(llm)
        llm.close()


def check_no_leak(llm: LLM) -> None:
    """Every page and slot came back."""
    scheduler, until = llm.engine.scheduler, time.monotonic() + 20
    while scheduler.busy and time.monotonic() < until:
        time.sleep(0.001)  # an abort takes effect at the engine's next step
    stats = llm.page_stats()
    assert (stats.free + stats.cached, stats.live) == (stats.total, 0)
    assert sorted(scheduler._slots) == [*range(llm.config.max_seqs)]
    scheduler.check()


@pytest.fixture
def no_leak() -> Callable[[LLM], None]:
    """Checks that every page and slot came back."""
    return check_no_leak
