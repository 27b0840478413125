"""The three ways to have it: a bare checkout, an editable install, a wheel."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROBE = """
import importlib.util, sys
import nanodflash, nanodflash.kernels
assert nanodflash.LLM.__name__ == "LLM"
assert importlib.util.find_spec("nanodflash.nanodflash") is None
spec = importlib.util.find_spec("kernels")
print(nanodflash.__file__, nanodflash.kernels.__file__, spec and spec.origin, sep="\\n")
"""

FORGET = """
import sys
for name in [name for name in sys.modules if name.startswith("__editable__")]:
    finders = [f for f in sys.meta_path if getattr(f, "__module__", "") == name]
    sys.meta_path[:] = [f for f in sys.meta_path if f not in finders]
    del sys.modules[name]
"""


def probe(folder: Path, *paths: Path, site: Path | None = None) -> list[str]:
    """Import from a folder with these on the path; where package and kernels were found.

    A `site` stands for an environment: an editable install in this interpreter is put out of it.
    """
    enter = f"import site; sys.path.insert(0, {str(site)!r}); site.addsitedir({str(site)!r})\n"
    code = FORGET + enter + PROBE if site else PROBE
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    run = subprocess.run(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-B", "-c", code],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked tree, without what an install leaves beside it."""
    folder = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split("\n")
    for name in filter(None, listed):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    return folder


def build(checkout: Path, out: Path, kind: str) -> Path:
    """Build a wheel with the backend that is installed: no network."""
    code = f"from setuptools.build_meta import {kind}; print({kind}({str(out)!r}))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return out / run.stdout.split()[-1]


def test_bare_checkout(checkout: Path, tmp_path: Path) -> None:
    package, kernels, *_ = probe(tmp_path, checkout)
    assert Path(package) == checkout / "nanodflash/__init__.py"
    assert Path(kernels) == checkout / "kernels/__init__.py"


def test_wheel_holds_the_library_only(checkout: Path, tmp_path: Path) -> None:
    wheel = build(checkout, tmp_path, "build_wheel")
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist()}
        assert top == {"nanodflash", f"{wheel.name.split('-py3')[0]}.dist-info"}
        assert {"nanodflash/kernels/__init__.py", "nanodflash/assets/target/config.json"} <= set(
            archive.namelist()
        )
        archive.extractall(tmp_path / "site")
    (tmp_path / "peer/kernels").mkdir(parents=True)
    (tmp_path / "peer/kernels/__init__.py").write_text("")
    package, kernels, other = probe(tmp_path, tmp_path / "site", tmp_path / "peer")
    assert Path(package).parent == tmp_path / "site/nanodflash"
    assert Path(kernels).parent == tmp_path / "site/nanodflash/kernels"
    assert Path(other).parent == tmp_path / "peer/kernels"


def test_editable_install(checkout: Path, tmp_path: Path) -> None:
    wheel = build(checkout, tmp_path, "build_editable")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    package, kernels, *_ = probe(tmp_path, site=tmp_path / "site")
    assert Path(package) == checkout / "nanodflash/__init__.py"
    assert Path(kernels) == checkout / "kernels/__init__.py"


def test_a_foreign_kernels_folder_is_left_alone(checkout: Path, tmp_path: Path) -> None:
    """Without our pyproject.toml beside it, `../kernels` may be anybody's.

    `-S`: an editable install in this interpreter would answer for `nanodflash.kernels`.
    """
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels/__init__.py").write_text("raise AssertionError('foreign')")
    (site / "nanodflash").mkdir()
    source = (checkout / "nanodflash/__init__.py").read_text()
    (site / "nanodflash/__init__.py").write_text(source)
    code = "import importlib.util as u, nanodflash; print(u.find_spec('nanodflash.kernels'))"
    run = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "None"
