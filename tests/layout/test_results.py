"""README's tables are those of the result files, and the files say where they come from."""

import gc
import json
from pathlib import Path

import pytest

import bench
from nanodflash.benchmarks import report

ROOT = Path(__file__).parents[2]
TABLES = {
    "decode": report.table,
    "concurrency": report.concurrency,
    "simulated": report.simulated,
    "overlap": report.overlapped,
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


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_simulated_run_shows_both_tables_and_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The README's table, what waits for what with overlap, and a trace of two processes."""
    monkeypatch.setattr(gc, "freeze", lambda: None)  # of all that other tests have loaded
    file = tmp_path / "trace.json"
    flags = ["--simulate", "0.2", "--concurrency", "2", "--steps", "40", "--rounds", "1"]
    assert bench.main([*flags, "--trace", str(file)]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert "\n".join(shown) == f"{report.simulated(result)}\n\n{report.queues(result)}"
    titles, _, row = shown[-3:]
    values = dict(zip(cells(titles), cells(row), strict=True))
    assert (values["step ms"], values["requests"]) == ("0.2", "2")
    assert float(values["surplus rows"].rstrip("%")) < 20
    assert 1 < float(values["steps launched"]) <= 2
    assert 0 < float(values["running"]) <= 2
    assert 0 < float(values["waiting"]) <= 2
    events = json.loads(file.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "no overlap", 1: "overlap"}
    for pid in names:
        spans = [event for event in events if event["pid"] == pid and event["ph"] == "X"]
        assert min(span["ts"] for span in spans) == 0
        assert {"plan", "wait", "read", "commit", "text", "launch", "step"} <= {
            span["name"] for span in spans
        }
