"""The rooms: who imports whom, what must not import torch, and that the README's tree is true."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nanodflash"
# Room -> rooms it may import. `config` may be imported by all and is left out.
ALLOWED = {
    "config": set(),
    "ops": {"kernels"},
    "models": {"ops"},
    "tokenizer": set(),
    "decoding": {"models", "ops"},
    "engine": {"decoding", "models", "ops", "tokenizer"},
    "checkpoint": {"models"},
    "options": {"engine", "decoding", "models", "ops"},
    "llm": {"options", "engine", "decoding", "models", "ops", "checkpoint", "tokenizer"},
    "requests": {"llm", "engine"},
    "cli": {"requests", "llm", "engine", "tokenizer"},
    "train": {"models", "decoding", "ops", "checkpoint", "tokenizer", "llm"},
    "benchmarks": {"llm", "engine", "decoding", "models", "ops", "tokenizer", "train"},
}
NO_TORCH = [
    "config",
    "models.config",
    "tokenizer",
    "decoding.plan",
    "engine.sequence",
    "engine.paging",
    "engine.scheduler",
    "engine.metrics",
    "engine.memory",
    "engine.width",
]
SOURCES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Rooms of nanodflash that a file imports, anywhere in it."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    inside = (name.split(".") for name in names if name.split(".")[0] == "nanodflash")
    rooms = {parts[1] for parts in inside}
    # `from nanodflash import LLM` reaches the front door
    public = {"LLM": "llm", "GenerationOutput": "llm", "SamplingParams": "config", "Chunk": "llm"}
    return {public.get(room, room) for room in rooms}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_only_what_lies_to_its_right(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        assert imported_rooms(path) == set()
        return
    assert imported_rooms(path) - ALLOWED[room] - {room, "config"} == set()


def test_kernels_import_nothing_of_the_package() -> None:
    for path in (ROOT / "kernels").rglob("*.py"):
        assert imported_rooms(path) <= {"kernels"}


@pytest.mark.parametrize("module", NO_TORCH)
def test_bookkeeping_imports_no_torch(module: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"import nanodflash.{module}\n"
        "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_cpu_path_imports_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None\nimport nanodflash.llm, nanodflash.ops"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_every_public_function_is_documented() -> None:
    bare = []
    for path in [*SOURCES, ROOT / "generate.py", ROOT / "bench.py"]:
        if "corpus" in path.parts and path.name != "__init__.py":
            continue  # one function a template; its name and its text say it
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), f"{path} has no docstring"
        for owner in [tree, *(n for n in tree.body if isinstance(n, ast.ClassDef))]:
            for node in owner.body:
                named = isinstance(node, ast.FunctionDef | ast.ClassDef)
                if named and not node.name.startswith("_") and not ast.get_docstring(node):
                    bare.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert bare == []


def test_files_stay_small() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in SOURCES
        if (lines := len(path.read_text().splitlines())) > 400
    }
    assert long == {}


def test_the_readme_tree_names_every_module_and_nothing_else() -> None:
    block = re.search(r"```tree\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block
    named: set[str] = set()
    folder = ""
    for line in block[1].splitlines():
        entry = line.split()[0] if line.strip() else ""
        if not line.startswith(" ") and entry.endswith("/"):
            folder = entry
            named.add(entry)
        elif entry:
            named.add(entry if not line.startswith(" ") else folder + entry)
    for name in named:
        assert (ROOT / name).exists(), f"README names {name}"
    modules = {
        str(p.relative_to(ROOT))
        for p in SOURCES
        if p.name not in ("__init__.py", "__main__.py") and "corpus" not in p.parts
    }
    missing = {m for m in modules if m not in named}
    assert missing == set()
