"""Configurations: published files are read as meant, what cannot run is refused by name."""

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kit import DRAFT, TARGET
from nanodflash.config import EngineConfig, SamplingParams
from nanodflash.models.config import DraftConfig, RopeConfig, TargetConfig, check_pair
from nanodflash.models.layers import inverse_frequencies
from nanodflash.models.qwen3 import Qwen3

ABSENT = object()  # as a value: the key is taken out
NAN, INF = float("nan"), float("inf")
SLIDING, FULL = "sliding_attention", "full_attention"
MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "target": (TargetConfig.from_dict, TARGET),
    "draft": (DraftConfig.from_dict, DRAFT),
}


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy of a `config.json` with other values, and without the keys that are ABSENT."""
    return {key: value for key, value in (config | changes).items() if value is not ABSENT}


def target(**changes: Any) -> TargetConfig:
    return TargetConfig.from_dict(changed(TARGET, **changes))


def draft(**changes: Any) -> DraftConfig:
    return DraftConfig.from_dict(changed(DRAFT, **changes))


def nested(**changes: Any) -> dict[str, Any]:
    """`dflash_config` with changes."""
    return changed(DRAFT["dflash_config"], **changes)


# ---------------------------------------------------------------------- published files

QWEN3_8B = """{
  "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
  "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
  "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
  "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
  "use_cache": true, "use_sliding_window": false, "vocab_size": 151936
}"""
QWEN3_8B_DFLASH = """{
  "architectures": ["DFlashDraftModel"], "model_type": "qwen3",
  "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 16, "num_target_layers": 36,
  "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
  "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 5,
  "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
  "rms_norm_eps": 1e-06, "rope_theta": 1000000, "rope_scaling": null,
  "max_position_embeddings": 40960,
  "layer_types": ["full_attention", "full_attention", "full_attention", "full_attention",
    "full_attention"],
  "sliding_window": null, "use_sliding_window": false, "attention_bias": false,
  "vocab_size": 151936, "tie_word_embeddings": false, "dtype": "bfloat16"
}"""
QWEN36_27B_DFLASH = """{
  "architectures": ["DFlashDraftModel"], "model_type": "qwen3",
  "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "num_target_layers": 64,
  "dflash_config": {"block_size": 16, "mask_token_id": 248070,
    "target_layer_ids": [1, 16, 31, 46, 61]},
  "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 5,
  "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
  "rms_norm_eps": 1e-06, "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
  "max_position_embeddings": 262144,
  "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention",
    "sliding_attention", "full_attention"],
  "sliding_window": 2048, "use_sliding_window": true, "attention_bias": false,
  "vocab_size": 248320, "tie_word_embeddings": false, "dtype": "bfloat16"
}"""


def test_qwen3_8b_and_its_drafter() -> None:
    big = TargetConfig.from_dict(json.loads(QWEN3_8B))
    assert big == TargetConfig(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        rope=RopeConfig(1e6),
        tie_word_embeddings=False,
    )
    small = DraftConfig.from_dict(json.loads(QWEN3_8B_DFLASH))
    assert small == DraftConfig(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        rope=RopeConfig(1e6),
        block_size=16,
        mask_token_id=151669,
        target_layer_ids=(1, 9, 17, 25, 33),
        num_target_layers=36,
        windows=(None,) * 5,
        causal=(False,) * 5,
    )
    check_pair(big, small)


def test_qwen36_27b_drafter() -> None:
    config = DraftConfig.from_dict(json.loads(QWEN36_27B_DFLASH))
    assert config.windows == (2048, 2048, 2048, 2048, None)
    assert config.causal == (True, True, True, True, False)
    assert config.target_layer_ids == (1, 16, 31, 46, 61)
    assert (config.block_size, config.mask_token_id) == (16, 248070)
    assert (config.num_target_layers, config.hidden_size) == (64, 5120)
    assert config.rope == RopeConfig(1e7)


# ---------------------------------------------------------------------- what both models share

WHOLE = [key for key, value in vars(target()).items() if type(value) is int]


ROTATIONS = ("partial_rotary_factor", "is_neox_style", "mrope_section")


@pytest.mark.parametrize("which", MODELS)
class TestShared:
    """Refusals of the geometry, in a target's file and in a drafter's."""

    def refuse(self, which: str, name: str, **changes: Any) -> None:
        read, base = MODELS[which]
        with pytest.raises(ValueError, match=rf"{which}: .*{name}"):
            read(changed(base, **changes))

    @pytest.mark.parametrize("key", [*WHOLE, "rms_norm_eps", "rope_theta", "architectures"])
    def test_missing(self, which: str, key: str) -> None:
        self.refuse(which, key, **{key: ABSENT})

    @pytest.mark.parametrize("key", WHOLE)
    @pytest.mark.parametrize("value", [0, -1, 2.5, True, False, None, "64", [64], {}])
    def test_not_whole(self, which: str, key: str, value: Any) -> None:
        self.refuse(which, key, **{key: value})

    @pytest.mark.parametrize("value", [64.0, NAN, INF])
    def test_not_whole_either(self, which: str, value: Any) -> None:
        self.refuse(which, "hidden_size", hidden_size=value)

    @pytest.mark.parametrize(
        "value",
        [0, 0.0, -1e-6, True, None, "1e-6", [1e-6], NAN, INF],
    )
    def test_eps(self, which: str, value: Any) -> None:
        self.refuse(which, "rms_norm_eps", rms_norm_eps=value)

    @pytest.mark.parametrize("value", [None, 0, -1, NAN, INF, True, "x", [1]])
    def test_theta(self, which: str, value: Any) -> None:
        self.refuse(which, "rope_theta", rope_theta=value)

    @pytest.mark.parametrize(("heads", "kv"), [(4, 3), (2, 4), (5, 2)])
    def test_heads(self, which: str, heads: int, kv: int) -> None:
        self.refuse(which, "num_key_value_heads", num_attention_heads=heads, num_key_value_heads=kv)

    def test_odd_head(self, which: str) -> None:
        self.refuse(which, "head_dim", head_dim=33)

    @pytest.mark.parametrize("value", ["gelu", "relu", None])
    def test_activation(self, which: str, value: Any) -> None:
        self.refuse(which, "hidden_act", hidden_act=value)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("attention_bias", True),
            ("mlp_bias", True),
            ("quantization_config", {"quant_method": "fp8"}),
            ("compression_config", {"format": "int-quantized"}),
        ],
    )
    def test_not_done(self, which: str, key: str, value: Any) -> None:
        self.refuse(which, key, **{key: value})

    @pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
    @pytest.mark.parametrize("value", [False, None])
    def test_neutral(self, which: str, key: str, value: Any) -> None:
        read, base = MODELS[which]
        assert read(changed(base, **{key: value})) == read(base)

    @pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
    def test_no_quantization(self, which: str, key: str) -> None:
        read, base = MODELS[which]
        assert read(changed(base, **{key: None})) == read(base)

    @pytest.mark.parametrize(
        "value",
        [
            None,
            [],
            "Qwen3ForCausalLM",
            ["Qwen3MoeForCausalLM"],
            ["Qwen3_5ForConditionalGeneration"],
            ["DFlash2DraftModel"],
            ["Qwen3ForCausalLM", "DFlashDraftModel"],
        ],
    )
    def test_architecture(self, which: str, value: Any) -> None:
        self.refuse(which, "architectures", architectures=value)

    @pytest.mark.parametrize("kind", ["longrope", "proportional", "su", "mrope", 5])
    @pytest.mark.parametrize("key", ["type", "rope_type"])
    def test_rope_type(self, which: str, kind: Any, key: str) -> None:
        self.refuse(which, f"rope_type {kind!r}", rope_scaling={key: kind, "factor": 2.0})
        self.refuse(which, f"rope_type {kind!r}", rope_parameters={key: kind, "factor": 2.0})

    @pytest.mark.parametrize(
        ("kind", "key"),
        [
            ("linear", "factor"),
            ("dynamic", "factor"),
            ("yarn", "factor"),
            ("llama3", "factor"),
            ("llama3", "low_freq_factor"),
            ("llama3", "high_freq_factor"),
            ("llama3", "original_max_position_embeddings"),
        ],
    )
    def test_rope_parameter(self, which: str, kind: str, key: str) -> None:
        full = {
            "rope_type": kind,
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        read, base = MODELS[which]
        assert read(changed(base, rope_parameters=full)).rope.rope_type == kind
        self.refuse(which, key, rope_parameters=changed(full, **{key: ABSENT}))

    @pytest.mark.parametrize("value", [None, 0, "4", True, NAN])
    def test_rope_factor(self, which: str, value: Any) -> None:
        self.refuse(which, "factor", rope_scaling={"type": "linear", "factor": value})

    @pytest.mark.parametrize(
        "changes",
        [
            {"partial_rotary_factor": 0.5},
            {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.25}},
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            {"rope_scaling": {"type": "default", "mrope_section": [8, 4, 4]}},
            {"is_neox_style": False},
        ],
    )
    def test_other_rotations(self, which: str, changes: dict[str, Any]) -> None:
        self.refuse(which, f"({'|'.join(ROTATIONS)})", **changes)

    def test_whole_rotation(self, which: str) -> None:
        read, base = MODELS[which]
        changes = {"partial_rotary_factor": 1.0, "is_neox_style": True}
        assert read(changed(base, **changes)) == read(base)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "yarn", "rope_theta": 5e5, "factor": 4.0}},
        {
            "rope_theta": ABSENT,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0},
        },
        {
            "rope_theta": 1.0,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 500000, "factor": 4.0},
        },
    ],
)
def test_rope_spellings(changes: dict[str, Any]) -> None:
    assert target(**changes).rope == RopeConfig(5e5, "yarn", {"factor": 4.0})


# ---------------------------------------------------------------------- target


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "sliding_window": 128},
        {"layer_types": [FULL] * 3 + [SLIDING]},
        {"layer_types": ["linear_attention"] * 4},
    ],
)
def test_target_refuses_windows(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"use_sliding_window|layer_types"):
        target(**changes)


def test_target_accepts_full_attention() -> None:
    changes = {"use_sliding_window": False, "sliding_window": 4096}
    assert target(layer_types=[FULL] * 4, **changes) == target()
    assert target(tie_word_embeddings=True).tie_word_embeddings
    assert not target(tie_word_embeddings=ABSENT).tie_word_embeddings


# ---------------------------------------------------------------------- drafter


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


# ---------------------------------------------------------------------- engine and request

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
