"""Folders: what loads, with which values, and what every refusal names."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanodflash import checkpoint as room
from nanodflash.checkpoint import load_model, open_checkpoint, save_model
from nanodflash.models.config import DraftConfig, TargetConfig
from nanodflash.models.dflash import DFlash
from nanodflash.models.qwen3 import Qwen3

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
NAN = float("nan")


def load_target(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Qwen3:
    checkpoint = open_checkpoint(str(folder))
    config = TargetConfig.from_dict(checkpoint.config)
    return load_model(Qwen3, config, checkpoint, "cpu", dtype)


def assert_holds(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    parts = model.parts()
    assert parts.keys() == tensors.keys()
    for name, tensor in tensors.items():
        held = parts[name].view()
        torch.testing.assert_close(held, tensor.to(held.dtype), rtol=0, atol=0, msg=name)


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:  # one line
        load_target(folder)
    return str(caught.value)


# Loading


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_target(write, target, shards, dtype):
    model = load_target(write(*target, shards=shards), dtype)
    assert_holds(model, target[1])
    assert not model.training
    assert all(p.dtype == dtype and not p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("shards", [1, 2])
def test_drafter(write, draft, shards):
    assert len(draft[1]) == 58
    checkpoint = open_checkpoint(str(write(*draft, shards=shards)))
    config = DraftConfig.from_dict(checkpoint.config)
    assert_holds(load_model(DFlash, config, checkpoint, "cpu", torch.bfloat16), draft[1])


@pytest.mark.parametrize("stored", [torch.float16, torch.float32, torch.float64])
def test_stored_dtypes(write, target, stored):
    config, tensors = target
    tensors |= {name: tensors[name].to(stored) for name in list(tensors)[::2]}
    assert_holds(load_target(write(config, tensors)), tensors)


def test_fused_rows_are_in_order(write, target):
    layer = load_target(write(*target)).layers[1]
    rows = [target[1][f"model.layers.1.self_attn.{key}_proj.weight"] for key in "qkv"]
    assert torch.equal(layer.qkv_proj, torch.cat(rows))
    rows = [target[1][f"model.layers.1.mlp.{key}_proj.weight"] for key in ("gate", "up")]
    assert torch.equal(layer.gate_up_proj, torch.cat(rows))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", ["5GB", "150KB"])
def test_what_transformers_wrote(tmp_path, target, tied, size):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        **{k: v for k, v in target[0].items() if k != "architectures"}
        | {"tie_word_embeddings": tied}
    )
    theirs = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path, max_shard_size=size)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or size == "5GB"
    ours = load_target(tmp_path)
    tensors = theirs.state_dict()
    if tied:
        del tensors["lm_head.weight"]
    assert_holds(ours, tensors)


def test_what_we_wrote(tmp_path, write, target):
    save_model(tmp_path / "again", load_target(write(*target)), target[0])
    assert_holds(load_target(tmp_path / "again"), target[1])


def test_weights_need_not_be_finite(write, target):
    target[1]["model.norm.weight"][:] = NAN
    assert load_target(write(*target)).norm.isnan().all()


def test_one_file_goes_before_an_index(write, target):
    folder = write(*target, shards=2)
    save_file(target[1], folder / WEIGHTS)
    (folder / SHARDS[0]).unlink()
    assert_holds(load_target(folder), target[1])


# Tied embeddings


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings(write, target, tied, present, shards):
    config, tensors = target
    if not present:
        del tensors["lm_head.weight"]
    folder = write(config | {"tie_word_embeddings": tied}, tensors, shards)
    if not tied and not present:
        assert "missing: lm_head.weight" in refusal(folder)
        return
    model = load_target(folder)
    if tied:
        tensors.pop("lm_head.weight", None)
        assert model.lm_head is model.embed_tokens
    assert_holds(model, tensors)


def test_a_drafter_has_no_head(write, draft):
    config, tensors = draft
    tensors["lm_head.weight"] = torch.zeros(320, 64)
    checkpoint = open_checkpoint(str(write(config | {"tie_word_embeddings": True}, tensors)))
    with pytest.raises(ValueError, match=r"unexpected: lm_head\.weight"):
        load_model(
            DFlash, DraftConfig.from_dict(checkpoint.config), checkpoint, "cpu", torch.float32
        )


# Headers


def _drop(tensors, *names):
    for name in names:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: _drop(t, "model.norm.weight"), ["missing: model.norm.weight"]),
        (
            lambda t: _drop(t, "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"),
            ["missing: model.layers.1.self_attn.k_proj.weight, model.norm.weight"],
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)}),
            ["unexpected: model.layers.0.self_attn.q_proj.bias"],
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(63)}),
            ["of another shape: model.norm.weight is [63], wanted [64]"],
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(64, 320)}),
            ["lm_head.weight is [64, 320], wanted [320, 64]"],
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(())}),
            ["model.norm.weight is [], wanted [64]"],
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(320, 64, dtype=torch.int8)}),
            ["of an unsupported dtype: lm_head.weight is I8, wanted BF16/F16/F32/F64"],
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(320, 64).to(torch.float8_e4m3fn)}),
            ["lm_head.weight is F8_E4M3"],
        ),
        (
            lambda t: t.update(
                {
                    "a.scale": torch.zeros(1),
                    "model.norm.weight": torch.zeros(1, dtype=torch.uint8),
                    "lm_head.weight": t.pop("model.embed_tokens.weight"),
                }
            ),
            [
                "missing: model.embed_tokens.weight",
                "unexpected: a.scale",
                "model.norm.weight is [1], wanted [64]",
                "model.norm.weight is U8",
            ],
        ),
    ],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_tensors_that_do_not_fit(write, target, shards, change, told):
    config, tensors = target
    change(tensors)
    folder = write(config, tensors, shards)
    error = refusal(folder)
    assert error.startswith(f"{folder}: its tensors do not fit its config.json; ")
    for words in told:
        assert words in error


def test_long_lists_are_counted(write, target):
    """A wrong prefix: both lists are long, and both begin."""
    config, tensors = target
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    error = refusal(write(config, tensors))
    assert error.count("model.") == 8
    assert "missing: model.embed_tokens.weight, model.layers.0." in error
    assert error.count(" and 16 more") == 2
    assert "unexpected: embed_tokens.weight, layers.0." in error


class Recorder:
    """`safe_open` that notes when tensors are read and whether the one before is still held."""

    def __init__(self, path: Path, framework: str) -> None:
        self.file = safe_open(path, framework)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        assert not any(tensor() is not None for _, tensor in READ[-1:])
        tensor = self.file.get_tensor(name)
        READ.append((name, weakref.ref(tensor)))
        return tensor


safe_open = room.safe_open
READ: list[tuple[str, Any]] = []


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(room, "safe_open", Recorder)
    READ.clear()


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("shards", [1, 2])
def test_tensors_are_read_once_and_one_at_a_time(write, target, shards):
    load_target(write(*target, shards=shards))
    assert sorted(name for name, _ in READ) == sorted(target[1])


@pytest.mark.usefixtures("recorded")
def test_a_refusal_reads_no_tensor(write, target, monkeypatch):
    monkeypatch.setattr(room, "_allocate", None)
    config, tensors = target
    tensors["lm_head.weight"] = torch.zeros(1)
    refusal(write(config, tensors, shards=2))
    assert not READ


# Files


@pytest.mark.parametrize("other", [None, "pytorch_model.bin", "consolidated.safetensors"])
def test_no_weights(write, target, other):
    folder = write(*target)
    (folder / WEIGHTS).unlink()
    if other:
        (folder / other).write_bytes(b"not read")
    assert "has neither" in (error := refusal(folder))
    assert "only safetensors are read" in error


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data[:20],
        lambda data: b"",
        lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        lambda data: data[:8] + b"x" + data[9:],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data + b"x",
    ],
    ids=["byte", "half", "header", "empty", "lfs", "json", "length", "longer"],
)
def test_corrupt_file(write, target, shards, spoil):
    folder = write(*target, shards=shards)
    path = folder / (WEIGHTS if shards == 1 else SHARDS[1])
    path.write_bytes(spoil(path.read_bytes()))
    assert refusal(folder).startswith(f"{path} is truncated or corrupt (")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is not readable JSON"),
        ("{", "is not readable JSON"),
        ("[]", "must hold a JSON object, got list"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": ["a"]}', "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "1 is not the name of a file beside it"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "'../x.safetensors' is not the name"),
        ('{"weight_map": {"a": "/x.safetensors"}}', "'/x.safetensors' is not the name"),
        ('{"weight_map": {"a": "sub/x.safetensors"}}', "'sub/x.safetensors' is not the name"),
        ('{"weight_map": {"a": ".."}}', f"lacks .., which {INDEX} names"),
        ('{"weight_map": {"a": ""}}', f"which {INDEX} names"),
    ],
)
def test_broken_index(write, target, text, told):
    folder = write(*target, shards=2)
    save_file(target[1], folder.parent / "x.safetensors")
    (folder / INDEX).write_text(text)
    assert told in refusal(folder)


def test_absent_shards(write, target):
    folder = write(*target, shards=3)
    for i in (1, 3):
        (folder / f"model-0000{i}-of-00003.safetensors").unlink()
    error = refusal(folder)
    assert "lacks model-00001-of-00003.safetensors, model-00003-of-00003.safetensors" in error


def test_a_tensor_that_its_shard_lacks(write, target):
    folder = write(*target, shards=2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = SHARDS[0]
    index["weight_map"]["lm_head.weight"] = SHARDS[0]
    held = load_file(folder / SHARDS[0])
    lacking = {"model.norm.weight", "lm_head.weight"} - held.keys()
    assert lacking
    (folder / INDEX).write_text(json.dumps(index))
    error = refusal(folder)
    for name in lacking:
        assert f"{name} (not in {SHARDS[0]})" in error


def test_a_tensor_beside_the_index(write, target):
    folder = write(*target, shards=2)
    held = load_file(folder / SHARDS[1])
    save_file(held | {"stray": torch.zeros(1)}, folder / SHARDS[1])
    assert "unexpected: stray" in refusal(folder)
    save_file(held, folder / SHARDS[1])
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    assert "missing: model.norm.weight" in refusal(folder)


# Opening


@pytest.mark.parametrize(
    "name",
    [
        "",
        "./missing",
        "/no/such",
        "a/b/c",
        "~/x",
        "~nobody/x",
        "a b",
        "a--b",
        "x" * 300,
        "hf://a/b",
    ],
)
def test_a_name_that_is_none(name):
    with pytest.raises(ValueError, match="is neither a folder nor a hub id such as Qwen/Qwen3-8B"):
        open_checkpoint(name)


def test_a_file_is_no_checkpoint(write, target):
    with pytest.raises(ValueError, match="is a file: give the folder"):
        open_checkpoint(str(write(*target) / WEIGHTS))


def test_a_folder_has_no_revision(write, target):
    with pytest.raises(ValueError, match="is a local folder, revision 'main' needs a hub id"):
        open_checkpoint(str(write(*target)), "main")


def test_a_folder_is_used_as_it_is(write, target, monkeypatch):
    folder = write(*target)
    opened = open_checkpoint(str(folder))
    assert (opened.name, opened.folder, opened.revision) == (str(folder), folder, None)
    assert opened.config == target[0]
    monkeypatch.chdir(folder.parent)
    assert open_checkpoint("checkpoint").config == target[0]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (None, "holds no config.json"),
        (b"", "config.json is not readable JSON"),
        (b"{'a': 1}", "config.json is not readable JSON"),
        (b"\xff\xfe\xfa", "config.json is not readable JSON"),
        (b"[" * 100_000, "config.json is not readable JSON"),
        (b"[]", "config.json must hold a JSON object, got list"),
        (b"null", "config.json must hold a JSON object, got NoneType"),
    ],
)
def test_broken_config(tmp_path, data, told):
    if data is not None:
        (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ValueError, match=told):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "generation", "wanted"),
    [
        ({}, None, ()),
        ({"eos_token_id": None}, {}, ()),
        ({"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": 0}, None, (0,)),
        ({"eos_token_id": [7, 8]}, {"temperature": 1}, (7, 8)),
        ({"eos_token_id": 7}, {"eos_token_id": 9}, (9,)),
        ({"eos_token_id": 7}, {"eos_token_id": [9, 7]}, (9, 7)),
        ({"eos_token_id": 7}, {"eos_token_id": None}, (7,)),
        ({"eos_token_id": 7}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": 7}, {"eos_token_id": []}, ()),
    ],
)
def test_eos_token_ids(tmp_path, config, generation, wanted):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert open_checkpoint(str(tmp_path)).eos_token_ids == wanted


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "value", ["</s>", 1.5, True, -1, 2**31, 10**23, [1, 10**23], [1, "2"], [[1]], {"id": 1}]
)
def test_broken_eos_token_id(tmp_path, file, value):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(
        ValueError, match=f"/{file}: eos_token_id is .* an id or a list of ids"
    ) as e:
        _ = open_checkpoint(str(tmp_path)).eos_token_ids
    assert repr(value) in str(e.value)


def test_a_long_value_is_cut(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ["</s>" * 99] * 9999}))
    with pytest.raises(ValueError, match="eos_token_id is") as error:
        _ = open_checkpoint(str(tmp_path)).eos_token_ids
    assert len(str(error.value)) < 300


def test_broken_generation_config(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json is not readable JSON"):
        _ = open_checkpoint(str(tmp_path)).eos_token_ids
