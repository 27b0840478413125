"""README's tables are those of the result files, and the files say where they come from."""

import json
from pathlib import Path

import pytest

from nanodflash.benchmarks import report

ROOT = Path(__file__).parents[2]
TABLES = {
    "decode": report.table,
    "concurrency": report.concurrency,
    "simulated": report.simulated,
}


@pytest.mark.parametrize("part", TABLES)
def test_the_readme_shows_the_result(part: str) -> None:
    result = json.loads((ROOT / f"docs/results/{part}.json").read_text())
    readme = (ROOT / "README.md").read_text()
    shown = readme.split(f"<!-- bench: {part} -->\n")[1].split(f"\n<!-- /bench: {part} -->")[0]
    assert shown == TABLES[part](result)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/results").glob("*.json")), ids=lambda p: p.stem
)
def test_a_result_has_a_source(path: Path) -> None:
    run = json.loads(path.read_text())["run"]
    assert run["command"].startswith("python bench.py")
    assert len(run["commit"]) == 12
    assert not run["dirty"]
