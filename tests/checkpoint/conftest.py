"""Tiny checkpoints as the hub has them, and a hub on 127.0.0.1 to download them from."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

GEOMETRY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
}
TARGET = GEOMETRY | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
DRAFT = GEOMETRY | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 5,
    "block_size": 4,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": 319, "target_layer_ids": [0, 2]},
}


def _layer(prefix: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.{name}.weight": shape
        for name, shape in (
            ("input_layernorm", (64,)),
            ("post_attention_layernorm", (64,)),
            ("self_attn.q_proj", (128, 64)),
            ("self_attn.k_proj", (64, 64)),
            ("self_attn.v_proj", (64, 64)),
            ("self_attn.o_proj", (64, 128)),
            ("self_attn.q_norm", (32,)),
            ("self_attn.k_norm", (32,)),
            ("mlp.gate_proj", (96, 64)),
            ("mlp.up_proj", (96, 64)),
            ("mlp.down_proj", (64, 96)),
        )
    }


def _random(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


@pytest.fixture
def target() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and the tensors of an untied target."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (320, 64)}
    for i in range(2):
        shapes |= _layer(f"model.layers.{i}")
    return dict(TARGET), _random(shapes | {"model.norm.weight": (64,), "lm_head.weight": (320, 64)})


@pytest.fixture
def draft() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and the 58 tensors of a drafter (dflash.md 1.1)."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (64, 128), "hidden_norm.weight": (64,)}
    for i in range(5):
        shapes |= _layer(f"layers.{i}")
    return dict(DRAFT), _random(shapes | {"norm.weight": (64,)})


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write config and tensors; with `shards` above 1 as that many files and an index."""

    def write(config: dict[str, Any], tensors: dict[str, Tensor], shards: int = 1) -> Path:
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        if shards == 1:
            save_file(tensors, folder / "model.safetensors")
            return folder
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            names = list(tensors)[i::shards]
            save_file({name: tensors[name] for name in names}, folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    return write


class Hub:
    """The part of the hub's protocol that downloads use.

    `repos` maps a repository to its files, all at one commit of the branch `main`. `fail` and
    `cut` map a path that starts so to a status that answers it, and to the number of bytes after
    which the connection is closed, once. `requests` lists (method, path, Range header). `home`
    is the `HF_HOME` of those who download.
    """

    home: Path
    commit = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.fail: dict[str, tuple[int, str]] = {}
        self.cut: dict[str, int] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def add(self, repo: str, folder: Path, **more: bytes) -> None:
        """Publish the files of `folder`."""
        self.repos[repo] = {file.name: file.read_bytes() for file in folder.iterdir()} | more

    def files(self, repo: str) -> list[str]:
        """The files of `repo` that were downloaded, in order."""
        start = f"/{repo}/resolve/"
        return [
            path.removeprefix(start).split("/", 1)[1]
            for method, path, _ in self.requests
            if method == "GET" and path.startswith(start)
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *args: Any) -> None:
        self.hub = hub
        super().__init__(*args)

    def log_message(self, *args: Any) -> None:
        """Requests are kept in `hub.requests`, not printed."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        for start, (status, code) in self.hub.fail.items():
            if path.startswith(start):
                return self.reply(status, b"", {"X-Error-Code": code})
        api = path.startswith("/api/models/")
        owner, name, verb, revision, *rest = path.removeprefix("/api/models").split("/")[1:]
        files = self.hub.repos.get(f"{owner}/{name}")
        if files is None:
            return self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", self.hub.commit):
            return self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if api:
            kept = {"revision": self.info, "tree": self.tree}[verb]
            return self.reply(200, json.dumps(kept(f"{owner}/{name}", files)).encode())
        data = files.get("/".join(rest))
        headers = {"X-Repo-Commit": self.hub.commit, "Accept-Ranges": "bytes"}
        if data is None:
            return self.reply(404, b"", headers | {"X-Error-Code": "EntryNotFound"})
        headers["ETag"] = f'"{hashlib.sha256(data).hexdigest()}"'
        begin = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0])
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        return self.reply(206 if begin else 200, data[begin:], headers, path)

    def info(self, repo: str, files: dict[str, bytes]) -> Any:
        siblings = [{"rfilename": name} for name in files]
        return {"id": repo, "sha": self.hub.commit, "siblings": siblings}

    def tree(self, repo: str, files: dict[str, bytes]) -> Any:
        return [
            {
                "type": "file",
                "path": name,
                "size": len(data),
                "oid": hashlib.sha1(data).hexdigest(),
                "lfs": {
                    "oid": hashlib.sha256(data).hexdigest(),
                    "size": len(data),
                    "pointerSize": 100,
                },
            }
            for name, data in files.items()
        ]

    def reply(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, path: str = ""
    ) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            stop = self.hub.cut.pop(path, None)
            self.wfile.write(body[:stop])
            self.close_connection = stop is not None


# A child has its own environment, which huggingface_hub reads when it is imported.
CHILD = """
import hashlib, json, sys
import torch
from nanodflash.checkpoint import load_model, open_checkpoint
from nanodflash.models.config import TargetConfig
from nanodflash.models.qwen3 import Qwen3

for line in sys.stdin:
    name, revision, load = json.loads(line)
    try:
        checkpoint = open_checkpoint(name, revision)
        answer = {"config": checkpoint.config, "revision": checkpoint.revision}
        if load:
            config = TargetConfig.from_dict(checkpoint.config)
            parts = load_model(Qwen3, config, checkpoint, "cpu", torch.bfloat16).parts()
            answer["tensors"] = {
                name: hashlib.sha256(part.view().view(torch.int16).numpy().tobytes()).hexdigest()
                for name, part in parts.items()
            }
    except ValueError as error:
        answer = {"error": str(error), "cause": type(error.__cause__).__name__}
    print(json.dumps(answer), flush=True)
"""

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


@pytest.fixture(scope="session")
def children(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Ask]]:
    """Processes that open and load checkpoints, one for each environment; one cache."""
    root = Path(__file__).parents[2]
    home = hub.home = tmp_path_factory.mktemp("hub")
    started: dict[str, subprocess.Popen[str]] = {}

    def start(kind: str, **changes: str) -> Ask:
        environment = {key: value for key, value in os.environ.items() if key[:3] != "HF_"} | {
            "PYTHONPATH": str(root),
            "HF_HOME": str(home),
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }
        log = home / f"{kind}.log"
        if kind not in started:
            with log.open("w") as stderr:
                started[kind] = subprocess.Popen(
                    [sys.executable, "-c", CHILD],
                    env=environment | changes,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                )

        def ask(name: str, revision: str | None = None, load: bool = False) -> dict[str, Any]:
            child = started[kind]
            assert child.stdin
            assert child.stdout
            print(json.dumps([name, revision, load]), file=child.stdin, flush=True)
            answer = child.stdout.readline()
            assert answer, log.read_text()
            return json.loads(answer)

        return ask

    yield start
    for child in started.values():
        child.communicate(timeout=30)


@pytest.fixture(scope="session")
def online(children: Callable[..., Ask]) -> Ask:
    """Open, and if asked load, a checkpoint in a child process that reaches the hub."""
    return children("online")


@pytest.fixture(scope="session")
def offline(children: Callable[..., Ask]) -> Ask:
    """The same with `HF_HUB_OFFLINE`."""
    return children("offline", HF_HUB_OFFLINE="1")


@pytest.fixture(scope="session")
def unreachable(children: Callable[..., Ask]) -> Ask:
    """The same with nothing listening where the hub should be."""
    return children("unreachable", HF_ENDPOINT="http://127.0.0.1:9")
