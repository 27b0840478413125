"""Downloads: what is asked of the hub, in which order, and what every failure says."""

import hashlib
import shutil
from typing import Any

import pytest
import torch

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
OTHERS = {
    "README.md": b"not needed",
    "pytorch_model.bin": b"not needed",
    "original/config.json": b"not needed",
    "original/consolidated.safetensors": b"not needed",
    "onnx/model.onnx": b"not needed",
}


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.view(torch.int16).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def publish(hub: Any, repo: str, write: Any, checkpoint: Any, shards: int = 1) -> dict[str, str]:
    hub.add(repo, write(*checkpoint, shards=shards), **OTHERS)
    return digests(checkpoint[1])


def test_one_file(hub, online, offline, write, target):
    wanted = publish(hub, "tiny/single", write, target)
    opened = online("tiny/single")
    assert opened == {"config": target[0], "revision": hub.commit}
    assert hub.files("tiny/single") == ["config.json"]
    assert online("tiny/single", load=True)["tensors"] == wanted
    assert hub.files("tiny/single") == ["config.json", "model.safetensors"]

    before = len(hub.requests)
    assert offline("tiny/single", load=True)["tensors"] == wanted
    assert offline("tiny/single", revision=hub.commit, load=True)["tensors"] == wanted
    assert len(hub.requests) == before


def test_shards(hub, online, offline, write, target):
    wanted = publish(hub, "tiny/shards", write, target, shards=2)
    hub.repos["tiny/shards"]["model-of-another-index.safetensors"] = b"not needed"
    assert online("tiny/shards", load=True)["tensors"] == wanted
    files = hub.files("tiny/shards")
    assert files[:2] == ["config.json", "model.safetensors.index.json"]
    assert sorted(files[2:]) == SHARDS
    assert offline("tiny/shards", load=True)["tensors"] == wanted


def test_text_files_come_with_the_config(hub, online, write, target):
    publish(hub, "tiny/text", write, target)
    text = ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    hub.repos["tiny/text"] |= {
        name: b"{}" + name.encode() for name in (*text, "chat_template.jinja")
    }
    online("tiny/text")
    assert sorted(hub.files("tiny/text")) == ["chat_template.jinja", "config.json", *text]


def test_weights_come_from_the_commit_of_the_config(hub, online, write, target):
    """`main` may move between the two; the cache then holds one commit, not a mixture."""
    publish(hub, "tiny/commit", write, target, shards=2)
    online("tiny/commit", load=True)
    revisions = {path.split("/")[4] for _, path, _ in hub.requests if "tiny/commit/res" in path}
    assert revisions <= {hub.commit}


def test_revision(hub, online, write, target):
    wanted = publish(hub, "tiny/revision", write, target)
    assert online("tiny/revision", revision="main")["revision"] == hub.commit
    assert online("tiny/revision", revision=hub.commit, load=True)["tensors"] == wanted


@pytest.mark.parametrize("repo", ["tiny/cut", "tiny/cutshards"])
def test_a_cut_connection(hub, online, write, target, repo):
    shards = 2 if "shards" in repo else 1
    wanted = publish(hub, repo, write, target, shards)
    file = SHARDS[1] if shards == 2 else "model.safetensors"
    hub.cut[f"/{repo}/resolve/{hub.commit}/{file}"] = 50_000
    answer = online(repo, load=True)
    assert not hub.cut
    if "error" in answer:
        assert "could not be downloaded" in answer["error"]
        answer = online(repo, load=True)
    assert answer["tensors"] == wanted


def test_a_failed_download_can_be_repeated(hub, online, write, target):
    wanted = publish(hub, "tiny/again", write, target, shards=2)
    path = f"/tiny/again/resolve/{hub.commit}/{SHARDS[1]}"
    hub.fail[path] = (403, "")  # the library repeats a 500 for half a minute
    answer = online("tiny/again", load=True)
    assert "could not be downloaded (" in answer["error"]
    del hub.fail[path]
    assert online("tiny/again", load=True)["tensors"] == wanted
    assert hub.files("tiny/again").count(SHARDS[0]) == 1


@pytest.mark.parametrize(
    ("repo", "revision", "fail", "told"),
    [
        ("tiny/absent", None, {}, ["is no folder here, and not on the hub", "HF_TOKEN"]),
        ("tiny/private", None, {"": (401, "RepoNotFound")}, ["not on the hub", "HF_TOKEN"]),
        ("tiny/there", "v9", {}, ["has no revision 'v9'"]),
        ("tiny/gated", None, {"": (403, "GatedRepo")}, ["is gated", "HF_TOKEN"]),
        ("tiny/down", None, {"": (500, "")}, ["could not be downloaded (", "500", "try again"]),
        ("tiny/busy", None, {"": (503, "")}, ["could not be downloaded (", "503", "try again"]),
    ],
)
def test_refused_by_the_hub(hub, online, write, target, repo, revision, fail, told):
    if repo != "tiny/absent":
        publish(hub, repo, write, target)
    hub.fail |= {f"/api/models/{repo}{rest}": answer for rest, answer in fail.items()}
    hub.fail |= {f"/{repo}/resolve{rest}": answer for rest, answer in fail.items()}
    answer = online(repo, revision=revision)
    assert answer["error"].startswith(f"'{repo}' ")
    assert "\n" not in answer["error"]
    assert answer["cause"] != "NoneType"
    for words in told:
        assert words in answer["error"]


def test_gated_files_of_a_listed_repository(hub, online, write, target):
    publish(hub, "tiny/terms", write, target)
    hub.fail["/tiny/terms/resolve"] = (403, "GatedRepo")
    assert "'tiny/terms' is gated" in online("tiny/terms")["error"]


def test_a_repository_without_a_config(hub, online):
    hub.repos["tiny/dataset"] = dict(OTHERS)
    assert "tiny/dataset holds no config.json" in online("tiny/dataset")["error"]


def test_a_repository_without_safetensors(hub, online, write, target):
    publish(hub, "tiny/pickle", write, target)
    del hub.repos["tiny/pickle"]["model.safetensors"]
    assert "only safetensors are read" in online("tiny/pickle", load=True)["error"]
    assert hub.files("tiny/pickle") == ["config.json"]


def test_a_shard_that_the_repository_lacks(hub, online, write, target):
    publish(hub, "tiny/lacks", write, target, shards=2)
    del hub.repos["tiny/lacks"][SHARDS[1]]
    assert f"tiny/lacks lacks {SHARDS[1]}" in online("tiny/lacks", load=True)["error"]


def test_offline(hub, online, offline, write, target):
    publish(hub, "tiny/part", write, target)
    before = len(hub.requests)
    for repo in ("tiny/never", "tiny/part"):
        assert "cache, and HF_HUB_OFFLINE is set" in offline(repo)["error"]
    assert len(hub.requests) == before
    online("tiny/part")  # the weights are still missing
    assert "cache, and HF_HUB_OFFLINE is set" in offline("tiny/part", load=True)["error"]


def test_unreachable(hub, online, unreachable, write, target):
    error = unreachable("tiny/unheard")["error"]
    assert error.startswith("'tiny/unheard' could not be downloaded (")
    wanted = publish(hub, "tiny/cached", write, target)
    online("tiny/cached", load=True)
    assert unreachable("tiny/cached", load=True)["tensors"] == wanted


def test_a_cache_without_listings(hub, online, offline, unreachable, write, target):
    """As other libraries leave it: they ask for one file at a time."""
    wanted = publish(hub, "tiny/unlisted", write, target, shards=2)
    online("tiny/unlisted", load=True)
    cache = hub.home / "hub" / "models--tiny--unlisted"
    shutil.rmtree(cache / "trees", ignore_errors=True)
    for ask in (offline, unreachable):
        assert ask("tiny/unlisted", load=True)["tensors"] == wanted
    assert offline("tiny/unlisted", hub.commit, load=True)["tensors"] == wanted

    (cache / "snapshots" / hub.commit / SHARDS[0]).unlink()
    assert "HF_HUB_OFFLINE is set" in offline("tiny/unlisted", load=True)["error"]
    (cache / "snapshots" / hub.commit / "model.safetensors.index.json").unlink()
    assert "HF_HUB_OFFLINE is set" in offline("tiny/unlisted", load=True)["error"]
