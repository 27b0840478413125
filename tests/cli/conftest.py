"""A tiny random pair whose tokenizer spells some of its ids, and one that brings none."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

import kit
from nanodflash.llm import LLM

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if enable_thinking %}[think]{% endif %}[assistant]"
)


class Pair(NamedTuple):
    """Folders of the target, its drafter, and the same target without tokenizer or template."""

    target: Path
    draft: Path
    mute: Path
    untemplated: Path

    def flags(self, *more: str) -> list[str]:
        """The arguments that decode with this pair, reproducibly."""
        return ["--model", str(self.target), "--draft", str(self.draft), "--dtype", "fp64", *more]


def write_tokenizer(folder: Path, template: str | None) -> None:
    """Byte-level BPE of 260 ids; the rest of the model's 320 are ids without a token."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=259, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["hello hello hello there"], trainer)
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    target, draft = kit.save_pair(folder)
    mute = shutil.copytree(target, folder / "mute")
    untemplated = shutil.copytree(target, folder / "untemplated")
    write_tokenizer(target, TEMPLATE)
    write_tokenizer(untemplated, None)
    return Pair(target, draft, mute, untemplated)


@pytest.fixture(scope="session")
def llm(pair):
    with LLM(pair.target, pair.draft, dtype="fp64") as made:
        yield made


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
