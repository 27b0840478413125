"""Small tokenizers of each kind that a checkpoint may bring, and the real one if it is there."""

import os
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from nanodflash.tokenizer import Tokenizer

LINES = [
    "Hello world, how are you? I'm fine, thanks.",
    "안녕하세요 세계, 만나서 반갑습니다.",
    "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง",
    "Cafe\u0301 nai\u0308ve Z\u0335\u0321a\u0328\u0301lgo",
    "👨\u200d👩\u200d👧\u200d👦 👍🏽 🏳️\u200d🌈 \ufffd",
    "STOP stop ###\n\nUser:",
]
SPECIAL = [AddedToken("<|end|>", special=True), AddedToken("<|start|>", special=True)]
QWEN3 = "NANODFLASH_QWEN3_TOKENIZER"  # names a folder with the tokenizer files of Qwen3


def byte_level(decoder: decoders.Decoder | None = None) -> Tokenizer:
    """Byte-level BPE as in Qwen3: tokens are pieces of UTF-8."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoder or decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(LINES, trainer)
    backend.add_special_tokens(SPECIAL)
    # not special: one of bytes' characters, one that no byte-level vocabulary can spell
    backend.add_tokens(["<think>", "\ufffd", "ok 你"])
    return Tokenizer(backend)


def byte_fallback(decoder: decoders.Decoder | None = None) -> Tokenizer:
    """Sentencepiece-style BPE as in Llama 2: a token a character, rare ones as byte tokens."""
    characters = [*"▁abcdefghlorstuSTOPUser:#é", "\ufffd", "▁▁", "▁hello", "llo"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(characters)]
    vocab = {piece: rank for rank, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoder or decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend)


def metaspace() -> Tokenizer:
    """Byte fallback whose decoder drops the first token's space instead of stripping the text."""
    steps = [decoders.ByteFallback(), decoders.Metaspace()]
    return byte_fallback(decoders.Sequence(steps))


def nested_byte_level() -> Tokenizer:
    """Byte-level BPE whose decoder does not show what it is."""
    return byte_level(decoders.Sequence([decoders.ByteLevel()]))


KINDS = {
    "byte_level": byte_level,
    "nested_byte_level": nested_byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
}


@pytest.fixture(scope="session", params=KINDS)
def any_tokenizer(request) -> Tokenizer:
    return KINDS[request.param]()


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="session")
def byte_fallback_tokenizer() -> Tokenizer:
    return byte_fallback()


@pytest.fixture(scope="session")
def qwen3_folder() -> Path:
    if QWEN3 not in os.environ:
        pytest.skip(f"set {QWEN3} to a folder with Qwen3's tokenizer files")
    return Path(os.environ[QWEN3])


@pytest.fixture(scope="session")
def qwen3_tokenizer(qwen3_folder) -> Tokenizer:
    return Tokenizer.from_folder(qwen3_folder)
