"""What an engine and a request may ask for: everything else is refused by name."""

from typing import Any

import pytest

from models.test_config import INF, NAN
from nanodflash.config import EngineConfig, SamplingParams

NOT_NUMBERS = [None, True, False, "1", [1], NAN, INF, -INF]


@pytest.mark.parametrize("value", [True, False, "1", [1], NAN, INF, 0, -1, 1.0])
@pytest.mark.parametrize(
    "key", ["max_model_len", "block_size", "page_size", "max_seqs", "max_prefill", "num_pages"]
)
def test_engine_config(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        EngineConfig(**{"max_model_len": 64} | {key: value})


def test_engine_config_limits() -> None:
    for key in ("max_model_len", "num_pages"):
        with pytest.raises(ValueError, match=key):
            EngineConfig(**{"max_model_len": 64} | {key: 1})
    assert EngineConfig(max_model_len=2, num_pages=2, page_size=1).total_pages == 2


@pytest.mark.parametrize(
    ("length", "block", "page", "pages"),
    [(64, 1, 64, 2), (63, 1, 64, 1), (64, 16, 16, 5), (65, 16, 16, 6), (5, 3, 1, 8)],
)
def test_engine_pages(length: int, block: int, page: int, pages: int) -> None:
    config = EngineConfig(max_model_len=length, block_size=block, page_size=page, max_seqs=3)
    assert config.pages_per_seq == pages
    assert config.total_pages == 3 * pages + 1


BAD_PARAMS: dict[str, list[Any]] = {
    "max_new_tokens": [*NOT_NUMBERS, 0, -1, 1.0],
    "temperature": [*NOT_NUMBERS, -0.1, -1, 0.00009, 10001],
    "top_k": [*NOT_NUMBERS, -1, 2.0, 2**31],
    "top_p": [*NOT_NUMBERS, 0, 0.0, -0.5, 1.0001, 2],
    "min_p": [*NOT_NUMBERS, -0.01, 1.0001, 2],
    "seed": [x for x in NOT_NUMBERS if x is not None] + [1.0, 2**64, -(2**63) - 1],
    "stop": ["", ("",), ("a", ""), ("a", 5), (None,), b"x", None, 5, True],
    "stop_token_ids": [
        *((-1,), (2**31,), (1.0,), (True,), ("1",), "12", (None,), (NAN,)),
        None,
        5,
        True,
    ],
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param(key, *getattr(value, "values", [value]), marks=getattr(value, "marks", ()))
        for key, values in BAD_PARAMS.items()
        for value in values
    ],
)
def test_sampling_params(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        SamplingParams(**{key: value})


@pytest.mark.parametrize(
    "params",
    [
        {"max_new_tokens": 1},
        {"temperature": 0, "top_p": 1, "min_p": 0},
        {"temperature": 1e-4, "top_k": 2**31 - 1},
        {"temperature": 1e4, "top_p": 1e-30, "min_p": 1, "top_k": 10**6},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"seed": None},
        {"stop_token_ids": (0, 5)},
    ],
)
def test_sampling_params_accepted(params: dict[str, Any]) -> None:
    made = SamplingParams(**params)
    assert {key: getattr(made, key) for key in params} == params


def test_stop_is_a_tuple() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)  # type: ignore[arg-type]
    assert SamplingParams().stop == ()
