"""What an LLM's options mean: which operations run, and where kernels cannot."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kit
from nanodflash import LLM, ops, options
from nanodflash.models.config import DraftConfig, TargetConfig

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")


def choose(
    reference: Any = (), device: Any = CUDA, dtype: Any = torch.bfloat16, **changes: Any
) -> ops.Ops:
    target = TargetConfig.from_dict(kit.TARGET | changes)
    return options.choose_ops(reference, device, dtype, target, DraftConfig.from_dict(kit.DRAFT))


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    """Where Python's headers are."""
    return tmp_path


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch, headers: Path) -> Any:
    """A Triton that says which one it is, and all it needs; the kernels are not asked for."""
    made = SimpleNamespace(__version__="3.6.0")
    monkeypatch.setitem(sys.modules, "triton", made)
    monkeypatch.setattr(ops, "kernel_ops", lambda names: ("kernels", names))
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(options.sysconfig, "get_paths", lambda: {"include": str(headers)})
    (headers / "Python.h").touch()
    return made


@pytest.mark.parametrize("version", ["3.6.0", "3.9.0", "3.10.1+git1234", "4.0"])
def test_kernels_run_on_cuda(triton: Any, version: str) -> None:
    triton.__version__ = version
    assert choose(("attention", "choose")) == ("kernels", ("attention", "choose"))


@pytest.mark.parametrize(
    ("version", "dtype", "changes", "told"),
    [
        ("3.5.1", torch.bfloat16, {}, "Triton is 3.5.1, wanted 3.6 or newer"),
        ("2.1", torch.bfloat16, {}, "Triton is 2.1"),
        ("3.6.0", torch.float64, {}, "no fp64"),
        ("3.6.0", torch.bfloat16, {"head_dim": 48}, "a head_dim of 16, 32, 64 or 128, got 48"),
        ("3.6.0", torch.bfloat16, {"head_dim": 256}, "got 256"),
    ],
)
def test_where_they_cannot_run_one_line_says_so(
    triton: Any, version: str, dtype: torch.dtype, changes: Any, told: str
) -> None:
    triton.__version__ = version
    with pytest.warns(UserWarning, match=f"reference operations run, slowly: .*{told}") as seen:
        assert choose(dtype=dtype, **changes) is ops.REFERENCE
    assert len(seen) == 1


def test_without_a_compiler(triton: Any, headers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would raise at the first launch, in the middle of a step."""
    monkeypatch.delenv("CC")
    monkeypatch.setattr(options.shutil, "which", lambda name: None)
    with pytest.warns(UserWarning, match="needs a C compiler"):
        assert choose() is ops.REFERENCE
    monkeypatch.setattr(options.shutil, "which", lambda name: name if name == "clang" else None)
    assert choose() == ("kernels", ())
    (headers / "Python.h").unlink()
    with pytest.warns(UserWarning, match="needs Python's headers"):
        assert choose() is ops.REFERENCE


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(UserWarning, match="Triton is not installed"):
        assert choose() is ops.REFERENCE


def test_a_cpu_runs_the_definitions() -> None:
    assert choose(device=CPU) is ops.REFERENCE
    assert choose(("attention",), device=CPU) is ops.REFERENCE


@pytest.mark.parametrize("names", ["attention", ("flash",), ("rms_norm", 3), (None,)])
def test_an_unknown_operation_is_refused(pair: Any, names: Any) -> None:
    with pytest.raises(ValueError, match=r"reference_ops is .*wanted names of rms_norm"):
        LLM(pair.target, pair.draft, reference_ops=names)


def test_the_table_is_the_engines_own(pair: Any) -> None:
    """No state of the process: two engines, two tables; the models have their engine's."""
    own = ops.Ops(silu_mul=lambda x: ops.silu_mul(x))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanodflash.llm.choose_ops", lambda *_: own)
        one = LLM(pair.target, pair.draft)
    with one, LLM(pair.target, pair.draft) as other:
        for llm, table in ((one, own), (other, ops.REFERENCE)):
            decoder = llm.engine.runner.steps.decoder
            assert decoder.ops is decoder.target.table is decoder.draft.table is table
