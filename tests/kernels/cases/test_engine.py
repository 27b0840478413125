"""The whole engine on kernels: what it emits is what it emits on the definitions."""

from pathlib import Path
from typing import Any

import pytest
import torch

import kit
from nanodflash import LLM, SamplingParams, llm, ops

PROMPTS = [[5, 9, 300], [*range(11)]]
SAMPLING = {  # few tokens: an interpreted cycle takes seconds
    "greedy": SamplingParams(max_new_tokens=3),
    "sampled": SamplingParams(max_new_tokens=2, temperature=0.8, top_k=40, top_p=0.9, seed=3),
    "full": SamplingParams(max_new_tokens=3, presence_penalty=0.7, logit_bias={4: 1.5}),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return kit.save_pair(tmp_path_factory.mktemp("pair"))


def run(pair: Any, table: ops.Ops, name: str, **options: Any) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm, "choose_ops", lambda *_: table)
        given = {"dtype": "fp32", "page_size": 16, "max_model_len": 64} | options
        given |= {"device": torch.get_default_device().type, "verify_width": 4}
        with LLM(*pair, **given) as engine:
            assert engine.engine.runner.steps.decoder.ops is table
            outputs = engine.generate(PROMPTS, SAMPLING[name])
    return [(output.token_ids, output.metrics.emitted) for output in outputs]


SLOW = pytest.param("full", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["greedy", "sampled", SLOW])
def test_the_same_tokens(pair: Any, name: str) -> None:
    assert run(pair, ops.kernel_ops(), name) == run(pair, ops.REFERENCE, name)


@pytest.mark.parametrize("name", ops.NAMES)
def test_any_of_them_can_be_the_definition(pair: Any, name: str) -> None:
    table = ops.kernel_ops((name,))
    assert getattr(table, name) is getattr(ops.REFERENCE, name)
    others = [other for other in ops.NAMES if other != name]
    assert all(getattr(table, other) is not getattr(ops.REFERENCE, other) for other in others)


@pytest.mark.slow
def test_definitions_and_kernels_mixed(pair: Any) -> None:
    table = ops.kernel_ops(ops.NAMES[::2])
    assert run(pair, table, "sampled") == run(pair, ops.REFERENCE, "sampled")
