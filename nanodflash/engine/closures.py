"""A fast CPU step: what a CUDA graph is on a GPU, a traced closure is here.

At the size of a small model most of a step's time goes to dispatching its operations from Python.
A cycle whose shapes are known, or a short prompt, is traced once and replayed, in two steps: to a
flat list of operators in which shapes are numbers, without what needs to be done only once
(`lean.py`); and that list to TorchScript, whose interpreter is not Python. What a step writes
(state and pages) is an input of its trace: the optimiser takes constants for immutable, and would
drop the writes. Weights are constants. Since no step asks the device for anything, a trace holds
for every value that its buffers take.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from nanodflash.decoding.cycle import (
    Decoder,
    Result,
    Verified,
    commit_step,
    draft_step,
    verify_step,
)
from nanodflash.decoding.plan import Facts
from nanodflash.engine.lean import PackedWeights, lean

AFTER = 128  # uses of a key before it is traced: what that costs is saved in about so many
MOST = 9  # traces an engine keeps: each is 5 to 9 MiB, which torch never gives back
MAX_ROWS = 4  # with more rows arithmetic outweighs dispatch, and there would be many keys
MAX_PROMPT = 64  # likewise, tokens of a prompt, rounded up

Tensors = tuple[Tensor, ...]


class EagerCycle:
    """The three steps of a cycle, run from Python."""

    def __init__(self, decoder: Decoder, facts: Facts) -> None:
        self.decoder, self.facts = decoder, facts

    def draft(self, slots: Tensor) -> Tensor:
        """`draft_step`."""
        return draft_step(self.decoder, slots, self.facts)

    def verify(self, slots: Tensor, proposals: Tensor | None) -> Verified:
        """`verify_step`."""
        return verify_step(self.decoder, slots, proposals, self.facts)

    def commit(self, slots: Tensor, verified: Verified) -> Result:
        """`commit_step`."""
        return commit_step(self.decoder, slots, verified)

    def run(self, slots: Tensor, mark: Callable[[str], None]) -> Result:
        """All of it, for slots [B]; `mark` is called with the name of a part when it ends."""
        proposals = None
        if self.facts.width > 1:
            proposals = self.draft(slots)
            mark("draft")
        verified = self.verify(slots, proposals)
        mark("verify")
        result = self.commit(slots, verified)
        mark("commit")
        return result


class TracedCycle(EagerCycle):
    """The same for one key (batch size and facts), replayed from traces."""

    def __init__(self, decoder: Decoder, facts: Facts, traces: "Traces") -> None:
        super().__init__(decoder, facts)
        self.traces = traces

    def run(self, slots: Tensor, mark: Callable[[str], None]) -> Result:
        """The cycle of `slots` in two parts, draft, and verify with commit, each replayed once it
        is traced. A caller's proposer is foreign code and never is.
        """
        proposals: Tensors = ()
        key = (len(slots), self.facts)
        if self.facts.width > 1:
            step = lambda slots: (self.draft(slots),)  # noqa: E731
            own = self.decoder.proposer is None
            proposals = self.traces.run("draft", key, step, slots) if own else step(slots)
            mark("draft")

        def finish(slots: Tensor, *proposals: Tensor) -> Tensors:
            return (self.commit(slots, self.verify(slots, (*proposals, None)[0])).record,)

        (record,) = self.traces.run("verify", key, finish, slots, *proposals)
        mark("verify")
        return Result(record, None)


class Traces:
    """Steps by name and key, an engine's own: run as they are, and replayed once they are traced.

    Attributes:
        made: what is traced.
    """

    def __init__(self, decoder: Decoder) -> None:
        pools = (decoder.target_pool, decoder.draft_pool)
        self._state = _present(*vars(decoder.state).values())
        self._written = (*self._state, *(pool.rows for pool in pools if pool is not None))
        self._packed = PackedWeights()
        self._uses = Counter[tuple[str, Hashable]]()
        self.made: dict[tuple[str, Hashable], Callable[..., Tensors]] = {}

    def run(
        self, name: str, key: Hashable, step: Callable[..., Tensors], *inputs: Tensor
    ) -> Tensors:
        """Run a step, or replay it.

        Args:
            key: every fact that is baked into the step, beside its name.
        """
        one = (name, key)
        self._uses[one] += 1
        with torch.inference_mode():
            if self._uses[one] == AFTER + 1 and len(self.made) < MOST:
                return self._trace(one, step, inputs)
            if one in self.made:
                return self.made[one](*inputs, *self._written)
            return step(*inputs)

    def _trace(
        self, one: tuple[str, Hashable], step: Callable[..., Tensors], inputs: Tensors
    ) -> Tensors:
        """Trace a step by running it."""
        given, made = (*inputs, *self._written), list[Tensors]()
        # It runs twice. K/V rows are written alike both times; what is known of the slots must be
        # as it was, since a second commit would be one more.
        before = [tensor.clone() for tensor in self._state]
        graphs = [lean(_record(step, inputs, given))]
        packed = self._packed.use(graphs[0])
        for tensor, value in zip(self._state, before, strict=True):
            tensor.copy_(value)

        def recorded(*given: Tensor) -> Tensors:
            made.append(graphs[0](*given))
            return made[-1]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whatever the tracer has to say of constants
            traced = torch.jit.trace(recorded, (*given, *packed), check_trace=False)
        self.made[one] = lambda *given: traced(*given, *packed)
        if not made:  # PYTORCH_JIT=0: `traced` is `recorded`
            return self.made[one](*given)
        graphs.clear()  # torch keeps `recorded`, and 1 MiB more with it
        # Half of it are numbers, one by one.
        torch._C._jit_pass_constant_pooling(traced.graph)  # type: ignore[attr-defined]
        return made.pop()


def _record(step: Callable[..., Tensors], inputs: Tensors, given: Tensors) -> GraphModule:
    """What a step does. All that it made in between is free on return: torch makes it once more."""
    recorder = Recorder(given)
    with recorder:
        results = step(*inputs)
    return recorder.finish(results)


class _Notes:
    """Notes every operator that runs, by the tensors that it is given and gives.

    Args:
        inputs: of what will be recorded; any other tensor that is read is a constant.
    """

    def __init__(self, inputs: Tensors) -> None:
        super().__init__()
        self.root, self.graph = torch.nn.Module(), Graph()
        self._nodes: dict[int, Node] = {}
        self._kept: list[Tensor] = []  # alive, so that an identity is one tensor's
        for i, tensor in enumerate(inputs):
            self._name(tensor, self.graph.placeholder(f"given{i}"))

    def _name(self, tensor: Tensor, node: Node) -> Node:
        self._kept.append(tensor)
        node.meta["shape"] = tensor.shape
        self._nodes[id(tensor)] = node
        return node

    def _node(self, value: Any) -> Any:
        if isinstance(value, Tensor) and id(value) not in self._nodes:
            name = f"constant{len(self._kept)}"
            self.root.register_buffer(name, value.detach())
            return self._name(value, self.graph.get_attr(name))
        return self._nodes[id(value)] if isinstance(value, Tensor) else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # type: ignore[attr-defined]
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        made = func(*args, **kwargs)
        node = self.graph.call_function(func, *tree_map(self._node, (args, kwargs)))
        if isinstance(made, Tensor):
            self._name(made, node)
        else:
            for i, one in enumerate(made):
                self._name(one, self.graph.call_function(getitem, (node, i)))
        return made

    def finish(self, results: Tensors) -> GraphModule:
        """What was recorded, giving these tensors of it."""
        self.graph.output(tuple(map(self._node, results)))
        return GraphModule(self.root, self.graph)


class Recorder(_Notes, TorchDispatchMode):
    """The mode. Of one that brings the method itself torch imports its compiler: 150 MiB."""


def _present(*tensors: Tensor | None) -> Tensors:
    return tuple(tensor for tensor in tensors if tensor is not None)


def round_pages(pages: int) -> int:
    """Round up so that few keys occur: 2, 4, then two steps an octave."""
    grain = 1 << (pages.bit_length() - 2) if pages > 4 else 2
    return -(-pages // grain) * grain
