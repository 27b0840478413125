"""A drafter's configuration, and whether it fits a target."""

import math
import re
from typing import Any

import pytest
import torch

from kit import TARGET
from models.test_config import (
    ABSENT,
    FULL,
    INF,
    MODELS,
    NAN,
    SLIDING,
    changed,
    draft,
    nested,
    target,
)
from nanodflash.models.config import TargetConfig, check_pair
from nanodflash.models.layers import inverse_frequencies
from nanodflash.models.qwen3 import Qwen3


def test_nested_keys_win() -> None:
    keys = {"block_size": 4, "mask_token_id": 7, "target_layer_ids": [3, 0], "num_target_layers": 5}
    top = {"block_size": 9, "mask_token_id": 8, "target_layer_ids": [1], "num_target_layers": 6}
    for config in (
        draft(dflash_config=keys, **top),
        draft(dflash_config=keys, **dict.fromkeys(top, ABSENT)),
        draft(dflash_config=ABSENT, **keys),
        draft(dflash_config=None, **keys),
        draft(dflash_config={"block_size": 4}, **keys | {"block_size": 9}),
    ):
        assert {key: getattr(config, key) for key in keys} == keys | {"target_layer_ids": (3, 0)}


@pytest.mark.parametrize("key", ["block_size", "mask_token_id", "num_target_layers"])
@pytest.mark.parametrize("value", [ABSENT, None, -1, 2.0, "16", True, [16]])
def test_draft_numbers(key: str, value: Any) -> None:
    message = f"draft: .*{key}"
    with pytest.raises(ValueError, match=message):
        draft(dflash_config=nested(**{key: ABSENT}), **{key: value})
    if value is not ABSENT:  # a bad nested value is not papered over by the one at top level
        with pytest.raises(ValueError, match=message):
            draft(dflash_config=nested(**{key: value}), **{key: 4})


@pytest.mark.parametrize(("key", "value"), [("block_size", 1), ("num_target_layers", 0)])
def test_draft_numbers_too_small(key: str, value: int) -> None:
    with pytest.raises(ValueError, match=key):
        draft(**{key: value})
    assert draft(block_size=2, dflash_config=nested(mask_token_id=0)).mask_token_id == 0


@pytest.mark.parametrize(
    "value",
    [
        ABSENT,
        None,
        [],
        [-1, 2],
        [0, 2, 0],
        [0, 4],
        [0, 2.0],
        [0, True],
        ["0", "2"],
        [[0, 2]],
        "02",
        2,
        {"0": 2},
    ],
)
def test_taps(value: Any) -> None:
    with pytest.raises(ValueError, match=r"draft: .*target_layer_ids"):
        draft(dflash_config=nested(target_layer_ids=value))


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("value", [5, True, "x", FULL, {}, [], [[1], [2]], [None] * 2, [FULL] * 9])
def test_layer_types_of_another_form(which: str, value: Any) -> None:
    read, base = MODELS[which]
    with pytest.raises(
        ValueError, match=rf"{which}: layer_types of config\.json is .*wanted a list"
    ):
        read(changed(base, layer_types=value))


@pytest.mark.parametrize("key", ["tie_word_embeddings", "use_sliding_window"])
@pytest.mark.parametrize("value", ["false", "true", "", 0, 1, [], {}])
def test_flags_of_another_form(key: str, value: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"target: {key} of config\.json is .*wanted true or false"
    ):
        target(**{key: value})
    assert not getattr(target(**{key: None}), key, False)


ROPE = {
    "rope_theta": 1e6,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "attention_factor": None,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "truncate": True,
}
ROPE_LLAMA3 = list(ROPE)[1:5]  # those it cannot do without
JUNK = [
    *(None, True, False, "x", "", "1", 0, -5, 1, 1.5, 10**23, 10**400, 1e308, 1e-320, NAN, INF),
    *([], ["x"], [[1], [2]], {}, {"x": 1}),
]


def fits(kind: str, key: str, value: Any) -> bool:
    """Whether a value can stand in a rotary key."""
    if value is None:
        needed = {"llama3": ROPE_LLAMA3, "default": ()}.get(kind, ("factor",))
        return key not in ("rope_theta", *needed)
    if key == "truncate" or not isinstance(value, (int, float)) or isinstance(value, bool):
        return key == "truncate" and isinstance(value, bool)
    if key == "original_max_position_embeddings":
        return isinstance(value, int) and 2 <= value <= 2**24
    limit = {("yarn", "rope_theta"): 1.001, ("llama3", "high_freq_factor"): 1.001}
    most = 3.999 if (kind, key) == ("llama3", "low_freq_factor") else 1e30
    return limit.get((kind, key), 1e-30) <= value <= most or (value == 0 and key[:2] == "ms")


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "yarn", "llama3"])
@pytest.mark.parametrize("key", ROPE)
def test_rope_values(kind: str, key: str) -> None:
    """Whatever stands in a rotary key, it is refused by name or gives finite frequencies."""
    for value in JUNK:
        config = changed(TARGET, rope_parameters=ROPE | {"rope_type": kind, key: value})
        if fits(kind, key, value):
            frequencies, scale = inverse_frequencies(TargetConfig.from_dict(config))
            assert bool(frequencies.isfinite().all())
            assert math.isfinite(scale)
        else:
            either = "(low|high)_freq_factor" if "freq" in key else key
            with pytest.raises(ValueError, match=rf"^target: {either} of [^\n]*, wanted [^\n]*$"):
                TargetConfig.from_dict(config)


@pytest.mark.parametrize("which", MODELS)
def test_any_value_of_any_key(which: str) -> None:
    """A `config.json` is read or refused in one short line that names the key; nothing else."""
    read, base = MODELS[which]
    refused = 0
    keys = {*base, "layer_types", "rope_scaling", "rope_parameters", "sliding_window", "is_causal"}
    for key in sorted(keys | {"tie_word_embeddings", "use_sliding_window", "mlp_bias", *ROPE}):
        for value in [*JUNK, "x" * 9999, ["x"] * 9999, {"rope_type": ["x"] * 9999}]:
            try:
                read(changed(base, **{key: value}))
            except ValueError as error:
                told = str(error)
                assert re.match(rf"{which}: [^\n]{{1,300}}$", told), (key, value)
                refused += 1
    assert refused > 300


def test_the_largest_sizes_can_be_laid_out() -> None:
    most = {"vocab_size": 2**24, "hidden_size": 2**24, "intermediate_size": 2**24}
    heads = {"num_attention_heads": 2**10, "num_key_value_heads": 2**10, "head_dim": 2**10}
    with torch.device("meta"):
        Qwen3(target(**most, **heads, max_position_embeddings=2**24, num_hidden_layers=1))
    for key in (*most, *heads, "num_hidden_layers"):
        limit = 2**24 if key in most else 2**10
        with pytest.raises(ValueError, match=rf"{key} of config\.json is {limit + 2}"):
            target(**{key: limit + 2})


@pytest.mark.parametrize("value", [[0], [3], [3, 1, 0, 2]])
def test_taps_keep_their_order(value: list[int]) -> None:
    assert draft(dflash_config=nested(target_layer_ids=value)).target_layer_ids == tuple(value)


@pytest.mark.parametrize("value", ["x", [1], 5])
def test_dflash_config_is_a_table(value: Any) -> None:
    with pytest.raises(ValueError, match=f"dflash_config .*{re.escape(repr(value))}"):
        draft(dflash_config=value)


@pytest.mark.parametrize("window", [ABSENT, None, 0, -1, 4.0, "4", True])
def test_window_is_needed(window: Any) -> None:
    with pytest.raises(ValueError, match=r"draft: .*sliding_window"):
        draft(layer_types=[SLIDING, FULL], sliding_window=window)


@pytest.mark.parametrize(
    "value", [[FULL], [FULL] * 3, [SLIDING, "chunked_attention"], ["full", "full"], FULL]
)
def test_layer_types(value: Any) -> None:
    with pytest.raises(ValueError, match=r"draft: .*layer_types"):
        draft(layer_types=value, sliding_window=16)


@pytest.mark.parametrize("layer_types", [ABSENT, None, [FULL, FULL]])
def test_window_without_sliding_layers(layer_types: Any) -> None:
    config = draft(layer_types=layer_types, sliding_window=16)
    assert (config.windows, config.causal) == ((None, None), (False, False))


@pytest.mark.parametrize(
    ("changes", "causal"),
    [
        ({}, (True, False)),
        ({"is_causal": True}, (True, True)),
        ({"is_causal": False}, (False, False)),
        ({"dflash_config": nested(causal=True)}, (True, True)),
        ({"dflash_config": nested(causal=False)}, (False, False)),
        ({"is_causal": False, "dflash_config": nested(causal=True)}, (False, False)),
        ({"is_causal": True, "dflash_config": nested(causal=False)}, (True, True)),
    ],
)
def test_causality(changes: dict[str, Any], causal: tuple[bool, bool]) -> None:
    config = draft(layer_types=[SLIDING, FULL], sliding_window=16, **changes)
    assert (config.windows, config.causal) == ((16, None), causal)


REFUSED: dict[str, tuple[Any, list[Any]]] = {  # a value that is refused, values that change nothing
    "attention_sink_bias": (True, [None, False]),
    "attention_value_scale": (0.5, [None, 1, 1.0]),
    "projector_type": ("domino", [None, "dflash"]),
    "input_embedding_scale": (8.0, [None, 1.0]),
    "output_multiplier": (0.196, [None, 1.0]),
    "final_logit_softcapping": (20.0, [None]),
    "sample_from_anchor": (True, [None, False]),
    "use_swa": (True, [None, False]),
    "mask_token": ("<mask>", [None]),
    "conv_kernel_size": (2, [None]),
    "selector_top_k": (16, [None]),
}


@pytest.mark.parametrize("key", REFUSED)
def test_draft_refused(key: str) -> None:
    refused, neutral = REFUSED[key]
    for changes in ({key: refused}, {"dflash_config": nested(**{key: refused})}):
        with pytest.raises(ValueError, match=f"draft: {key}"):
            draft(**changes)
    for value in neutral:
        assert draft(**{key: value}) == draft()
        assert draft(dflash_config=nested(**{key: value})) == draft()


def test_dflash2_is_refused() -> None:
    """Also when its architecture's name is forged: its own keys tell."""
    more = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_top_k": 16}
    with pytest.raises(ValueError, match="architectures"):
        draft(architectures=["DFlash2DraftModel"], dflash_config=nested(**more))
    with pytest.raises(ValueError, match="conv_kernel_size"):
        draft(dflash_config=nested(**more))


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("hidden_size", {"hidden_size": 128}),
        ("vocab_size", {"vocab_size": 321}),
        ("num_target_layers", {"num_target_layers": 5}),
        ("mask_token_id", {"dflash_config": nested(mask_token_id=320)}),
    ],
)
def test_pair(key: str, changes: dict[str, Any]) -> None:
    check_pair(target(), draft())
    with pytest.raises(ValueError, match=key):
        check_pair(target(), draft(**changes))


def test_pair_may_differ_elsewhere() -> None:
    shape = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
    check_pair(target(), draft(intermediate_size=80, rope_theta=1e6, rms_norm_eps=1e-5, **shape))
