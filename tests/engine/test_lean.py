"""What is done to recorded operators: packed weights give what plain ones give, and only theirs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from kit import make_draft, make_target
from nanodflash import LLM, SamplingParams
from nanodflash.config import EngineConfig
from nanodflash.decoding.cycle import Decoder
from nanodflash.decoding.plan import Facts
from nanodflash.engine import closures, lean
from nanodflash.engine.closures import EagerCycle, Recorder, TracedCycle, Traces
from nanodflash.engine.lean import PackedWeights

has_mkl = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
needs_mkl = pytest.mark.skipif(not has_mkl, reason="torch without MKL")


def record(step: Callable[..., Tensor], *inputs: Tensor) -> GraphModule:
    recorder = Recorder(inputs)
    with torch.inference_mode(), recorder:
        made = step(*inputs)
    return lean.lean(recorder.finish((made,)))


def names(graph: GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@torch.inference_mode()
def test_what_depends_on_weights_alone_is_done_once() -> None:
    weight, x = torch.randn(6, 4), torch.randn(3, 4)
    graph = record(lambda x: (x @ weight.t().mul(2)).view(18).view(3, 6).view(2, 9) + 1, x)
    assert names(graph) == ["aten.mm.default", "aten.view.default", "aten.add.Tensor"]
    torch.testing.assert_close(graph(x)[0], (x @ weight.t() * 2).view(2, 9) + 1)


def by_view(x: Tensor) -> Tensor:
    scratch = torch.zeros(2)  # torch detaches it: what is added to is a view
    before = x[:2].clone()
    x[:2].add_(1)
    return torch.cat((scratch.add_(x[:2]), before))


def by_part(x: Tensor) -> Tensor:
    whole = torch.zeros(4)
    first, _ = whole.split(2)
    first.add_(x[:2])
    return whole + 1


def by_out(x: Tensor) -> Tensor:
    made = torch.ones(2)
    torch.add(x[:2], made, out=made)
    return made


def by_untold_view(x: Tensor) -> Tensor:
    product = torch.nn.functional.linear(torch.ones(1, 2, 3), torch.ones(2, 3))
    return product.add_(x[:2])


@pytest.mark.parametrize("step", [by_view, by_part, by_out, by_untold_view])
@torch.inference_mode()
def test_what_is_written_is_made_each_time(step: Callable[[Tensor], Tensor]) -> None:
    """A constant that a step fills, however it does, is no constant."""
    graph = record(step, torch.randn(4))
    for _ in range(3):
        x = torch.randn(4)
        mine, wanted = x.clone(), x.clone()
        assert graph(mine)[0].equal(step(wanted))
        assert mine.equal(wanted)


@torch.inference_mode()
def test_what_is_written_must_be_given() -> None:
    buffer = torch.zeros(4)
    with pytest.raises(AssertionError, match="must be an input"):
        record(lambda x: buffer[:2].add_(x[:2]), torch.randn(4))


@needs_mkl
@pytest.mark.filterwarnings("ignore")  # whatever the tracer has to say
@pytest.mark.parametrize(
    ("rows", "dtype", "packed"),
    [
        (1, torch.float32, 0),
        (7, torch.float32, 0),
        (8, torch.float32, 3),
        (16, torch.float32, 3),
        (17, torch.float32, 0),
        (16, torch.float64, 0),
        (16, torch.bfloat16, 0),
    ],
)
@torch.inference_mode()
def test_which_products_are_packed(rows: int, dtype: torch.dtype, packed: int) -> None:
    wide, square = torch.randn(24, 8, dtype=dtype), torch.randn(24, 24, dtype=dtype)
    x, scale = torch.randn(rows, 8, dtype=dtype), torch.randn(24, 3, dtype=dtype)

    def step(x: Tensor, scale: Tensor) -> Tensor:  # the last one is no product with a constant
        y = x @ wide.t()
        for matrix in (square, square.t(), square):
            y = (y @ matrix).tanh()
        return y @ scale

    packs = PackedWeights()
    for _ in range(2):
        graph = record(step, x, scale)
        given = packs.use(graph)
        assert len(given) == packed  # one of them twice
        assert names(graph).count("mkl._mkl_linear.default") == (4 if packed else 0)
        assert names(graph).count("aten.mm.default") == (1 if packed else 5)
        traced = torch.jit.trace(graph, (x, scale, *given), check_trace=False)
        torch.testing.assert_close(traced(x, scale, *given)[0], step(x, scale))
    assert len(packs._made) == packed, "packed twice"


@needs_mkl
@torch.inference_mode()
def test_an_address_that_is_used_again() -> None:
    """Weights come and go; what is packed is one weight's, for as long as it is kept."""
    packs, x = PackedWeights(), torch.randn(8, 16)
    for _ in range(5):
        weight = torch.randn(16, 16)
        graph = record(lambda x, weight=weight: x @ weight, x)
        torch.testing.assert_close(graph(x, *packs.use(graph))[0], x @ weight)
        del weight, graph


@needs_mkl
@torch.inference_mode()
def test_no_more_is_packed_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(8, 8)
    monkeypatch.setattr(lean, "MOST_BYTES", weight.nbytes)
    packs, counts = PackedWeights(), []
    for rows in (8, 9, 8):  # another number of rows is another layout
        graph = record(lambda x: x @ weight.t(), torch.randn(rows, 8))
        counts.append(len(packs.use(graph)))
    assert counts == [1, 0, 1]


@needs_mkl
@pytest.mark.parametrize("rows", [1, 2])
def test_a_cycle_in_fp32(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Replayed, with packed weights where a row is alone: tokens and K/V as from Python."""
    monkeypatch.setattr(closures, "AFTER", 1)
    config = EngineConfig(max_model_len=64, block_size=16, page_size=16, max_seqs=2)
    facts, slots, ends = Facts(16, "greedy", True, 32), torch.arange(rows), []
    models = make_target(torch.float32), make_draft(torch.float32)
    for traced in (True, False):
        decoder = Decoder(*models, config)
        state = decoder.state
        for slot in range(rows):
            state.page_table[slot, :4] = torch.arange(4) + 1 + 4 * slot
        state.state[:rows], state.budget[:rows], state.draft_limit[:rows] = 1, 50, 64
        state.anchor[:rows], state.stop_ids[:] = 7, -1
        traces = Traces(decoder)
        cycle = TracedCycle(decoder, facts, traces) if traced else EagerCycle(decoder, facts)
        records = []
        for _ in range(4):
            state.len[:rows], state.budget[:rows] = 3, 50
            records.append(cycle.run(slots, lambda name: None).record)
        assert len(traces.made) == 2 * traced
        assert bool(traces._packed._made) == (traced and rows == 1)
        assert decoder.draft_pool is not None
        ends.append((records[-1], decoder.target_pool.rows, decoder.draft_pool.rows))
    assert ends[0][0].equal(ends[1][0])
    for mine, wanted in zip(ends[0][1:], ends[1][1:], strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-4)


@needs_mkl
def test_the_bundled_pair_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are those of a run from Python."""
    monkeypatch.setattr(closures, "AFTER", 2)
    params, texts = SamplingParams(max_new_tokens=60), []
    for graphs in (True, False):
        with LLM(graphs=graphs) as llm:
            texts.append(llm.generate("Ada has 7 plums", params)[0].token_ids)
            if graphs:
                assert len(llm.engine.runner.steps._traces._packed._made) > 40
    assert texts[0] == texts[1]
