"""Training: the drafter's blocks are those of decoding, runs resume, folders load."""

import itertools
import json
import random
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kit
from nanodflash import LLM, SamplingParams
from nanodflash.config import EngineConfig
from nanodflash.decoding.cycle import Decoder, draft_step
from nanodflash.decoding.plan import Facts, Span
from nanodflash.llm import BUNDLED
from nanodflash.train import loop
from nanodflash.train.__main__ import main
from nanodflash.train.answers import MAX_ANSWER, ROWS, SAMPLED_ONE_IN, own_answers
from nanodflash.train.data import Document, batches, collate
from nanodflash.train.draft import Blocks, block_logits, block_loss, draw_blocks, mean_run
from nanodflash.train.optim import orthogonalize, schedule


@pytest.fixture(scope="module")
def pair():
    target, draft = kit.make_target(), kit.make_draft()
    for model in (target, draft):
        model.prepare(512)
    return target, draft


@pytest.mark.parametrize("anchor", [3, 4, 11, 19])
def test_a_training_block_is_the_block_of_decoding(pair, anchor: int) -> None:
    """Same proposals' logits from features strictly before the anchor, other blocks unseen."""
    target, draft = pair
    ids = [7, 300, 12, 45, 9, 81, 33, 3, 250, 17, 5, 99, 140, 6, 21, 64, 77, 2, 150, 31, 8, 40]
    size = draft.config.block_size
    anchors = torch.tensor([[anchor, 5, 16]])
    blocks = Blocks(torch.tensor([ids]), anchors, torch.zeros(1, 3, size - 1, dtype=torch.int64))
    logits, labelled = block_logits(draft, target, blocks)
    trained = logits.view(1, 3, size - 1, -1)[0, 0]
    assert bool(labelled.all())

    decoder = Decoder(target, draft, EngineConfig(max_model_len=64, block_size=size, page_size=4))
    state = decoder.state
    params = SamplingParams(max_new_tokens=9)
    prompt = ids[:anchor]
    kit.admit(state, 0, prompt, params, budget=9, draft_limit=64, pages=range(1, 10))
    kit.prefill(decoder, [Span(0, 0, anchor, True)], Facts(1, "greedy", True, 64))
    state.anchor[0] = ids[anchor]
    proposals = draft_step(decoder, torch.tensor([0]), Facts(size, "greedy", True, 64))
    assert proposals[0].tolist() == trained.argmax(-1).tolist()


def test_labels_end_with_the_answer() -> None:
    documents = [Document(list(range(10, 30)), 12), Document(list(range(50, 65)), 4)]
    ids, anchors, labels = draw_blocks(documents, 8, random.Random(0))
    for row, (tokens, answer) in enumerate(documents):
        for anchor, wanted in zip(anchors[row].tolist(), labels[row].tolist(), strict=True):
            assert answer <= anchor < len(tokens) - 1
            assert ids[row, anchor] == tokens[anchor]
            rest = tokens[anchor + 1 : anchor + 8]
            assert wanted == rest + [-100] * (7 - len(rest))


def test_loss_weighs_early_positions_more(pair) -> None:
    target, draft = pair
    documents = [Document(list(range(10, 60)), 12)] * 2
    blocks = draw_blocks(documents, 8, random.Random(0))
    logits, labelled = block_logits(draft, target, blocks)
    losses = torch.nn.functional.cross_entropy(logits, blocks.labels[labelled], reduction="none")
    place = torch.arange(7).expand_as(labelled)[labelled]
    weights = torch.exp(-place / 4.0)  # gamma 4 at block size 8
    wanted = (losses * weights).sum() / weights.sum()
    assert block_loss(draft, target, blocks).item() == pytest.approx(wanted.item(), rel=1e-6)
    assert 1 <= mean_run(draft, target, blocks) <= 8


def test_own_answers_are_the_targets(tmp_path: Path) -> None:
    target, _ = kit.save_pair(tmp_path, eos_token_id=list(range(0, 320, 20)))
    rng = random.Random(3)
    prompts = [[rng.randrange(320) for _ in range(rng.randrange(1, 9))] for _ in range(ROWS + 3)]
    answers = own_answers(str(target), prompts, seed=5)
    with LLM(target, None, dtype="fp32") as llm:
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            assert answer[-1] % 20 == 0 or len(answer) == MAX_ANSWER
            if i % SAMPLED_ONE_IN and i < 9:
                (alone,) = llm.generate(prompt, SamplingParams(MAX_ANSWER))
                assert alone.token_ids == answer


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 20, 8), (1, 16, 16)])
def test_orthogonalize(shape: tuple[int, ...]) -> None:
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, dtype=torch.float64)))
    assert 0.5 < values.min() < values.max() < 1.3


def test_schedule() -> None:
    assert [schedule(0, 0.0, 0.5), schedule(19, 0.1, 0.5)] == [0.05, 1.0]
    assert schedule(500, 0.75, 0.5) == pytest.approx(0.51)
    assert schedule(900, 1.0, 0.5) == pytest.approx(0.02)


def test_one_document_a_row() -> None:
    documents = iter([Document(list(range(4, 4 + n % 7 + 3)), 2) for n in range(2000)])
    batch = next(batches(documents, 60, 0))
    assert batch.ids.numel() <= 60
    again = collate([Document([5, 6, 7, 8], 2), Document([9, 10], 1)])
    assert again.labels.tolist() == [[6, 7, 8, -100], [10, -100, -100, -100]]
    assert again.answers.tolist() == [[False, True, True, False], [True, False, False, False]]


def test_both_trainings_resume_and_their_folders_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ticks = itertools.count()  # a clock of our own: 0.1 s a look, whatever the machine does
    clock = SimpleNamespace(monotonic=lambda: next(ticks) / 10)
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr("nanodflash.train.answers.MAX_ANSWER", 8)
    monkeypatch.setattr("nanodflash.train.draft.HELD_OUT", 4)
    target, draft = str(tmp_path / "target"), str(tmp_path / "draft")
    step = ["target", "--out", target, "--vocab-size", "512", "--tokens", "128"]
    assert main([*step, "--minutes", "0.01"]) == 0
    assert main([*step, "--minutes", "0.02"]) == 0
    assert "resumed at step" in capsys.readouterr().out
    history = json.loads((tmp_path / "target/training.json").read_text())
    assert history[-1][1] > history[0][1] > 0
    step = ["draft", "--target", target, "--out", draft, "--answers", "8", "--block-size", "4"]
    assert main([*step, "--minutes", "0.02"]) == 0
    assert main(["score", "--model", target, "--draft", draft, "--problems", "1"]) == 0
    scores = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert scores["problems"] == 1
    assert scores["metrics"]["cycles"] > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["target", "--text", "missing.txt"],
        ["draft", "--target", "./missing"],
        ["draft", "--target", "bundled-but-no-folder/x/y"],
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def untrained(*_: object, **__: object) -> None:
    raise AssertionError("something was run")


@pytest.mark.parametrize(
    "arguments",
    [
        *(f"target --out x --minutes {n}" for n in ("0", "-1", "nan", "inf", "1e9")),
        *(f"target --out x --{flag}" for flag in ("seed -1", f"seed {2**70}", "tokens 0")),
        *(f"target --out x --vocab-size {n}" for n in (-1, 0, 259, 10**9)),
        *(f"draft --target x --out x --minutes {n}" for n in ("0", "-0.1", "nan")),
        *(f"draft --target x --out x --answers {n}" for n in (-1, 0, 10**9)),
        *(f"draft --target x --out x --{flag} {n}" for flag in ("layers", "taps") for n in (0, -1)),
        *(f"draft --target x --out x --block-size {n}" for n in (-1, 0, 1, 10**9)),
        *(f"score --problems {n}" for n in (-1, 0, 10**9)),
        *("score --max-new-tokens 0", "score --seed -1"),
    ],
)
def test_numbers_no_run_can_do_with(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused at once, in one line: some would never end, others tell figures of nothing."""
    for name in ("target.train_target", "draft.train_draft", "score.score_pair"):
        monkeypatch.setattr(f"nanodflash.train.{name}", untrained)
    assert main(arguments.split()) == 2
    flag, value = arguments.split()[-2:]
    error = capsys.readouterr().err
    assert error.startswith(
        f"error: {flag} is {float(value) if 'min' in flag else value}, wanted a"
    )
    assert error.count("\n") == 1


def test_no_answers_left_to_train_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kept answers of another run may be too few, or all too short."""
    target, _ = kit.save_pair(tmp_path)
    shutil.copy(BUNDLED / "target/tokenizer.json", target)
    kept = tmp_path / "out/.train/answers.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps([[[1, 2, 3], 1]] * 128 + [[[1, 2], 1]] * 9))
    code = main(["draft", "--target", str(target), "--out", str(tmp_path / "out"), "--taps", "1"])
    told = capsys.readouterr().err
    assert (code, told.count("\n")) == (2, 1)
    assert f"{kept} holds 128 answers of two tokens or more, wanted more than 128" in told


def test_a_text_of_another_encoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_bytes(b"caf\xe9")
    assert main(["target", "--out", str(tmp_path), "--text", str(tmp_path / "text")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/text is not UTF-8 text")


@pytest.mark.parametrize("command", ["target --out x", "draft --target x --out x", "score"])
def test_only_what_resumes_says_so(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for name in ("target.train_target", "draft.train_draft", "score.score_pair"):
        monkeypatch.setattr(f"nanodflash.train.{name}", interrupt)
    assert main(command.split()) == 130
    told = "interrupted\n" if command == "score" else "interrupted; the same command resumes\n"
    assert capsys.readouterr().err == told
    monkeypatch.setattr(sys, "stderr", None)
    assert main(command.split()) == 130
    assert main([*command.split(), "--seed", "-1"]) == 2
    assert capsys.readouterr().out == ""
