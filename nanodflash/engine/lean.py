"""What is done to a recorded list of operators before it is traced: fewer of them, faster ones."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

ROWS = range(2, 17)  # of products with packed weights; one row is a product of another kind
MOST = 64 << 20  # bytes: with larger weights a product waits for memory, not for its layout
ATEN, MKL = torch.ops.aten, torch.ops.mkl


def lean(graph: GraphModule) -> GraphModule:
    """Take out what need not be done at every replay: what depends on weights alone, views of
    views, and views that are there already.
    """
    nodes = graph.graph
    reshapes = (ATEN.view.default, ATEN._unsafe_view.default)
    views = (*reshapes, ATEN.select.int, ATEN.slice.Tensor, ATEN.unsqueeze.default)
    seen: dict[tuple[object, str], Node] = {}
    written = _written(graph)
    for node in list(nodes.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
            continue
        if node.target in reshapes:
            source: Any = node.args[0]
            while source.target in reshapes:
                source = source.args[0]
            node.args = (source, *node.args[1:])
        same = seen.setdefault((node.target, str(node.args)), node)
        if node.target in views and same is not node:
            node.replace_all_uses_with(same)
        elif node not in written and all(n.op == "get_attr" for n in node.all_input_nodes):
            args, kwargs = map_arg(
                (node.args, node.kwargs), lambda n: getattr(graph, str(n.target))
            )
            value = node.target(*args, **kwargs)
            if isinstance(value, Tensor):
                graph.register_buffer(f"made_{node.name}", value)
                with nodes.inserting_before(node):
                    node.replace_all_uses_with(nodes.get_attr(f"made_{node.name}"))
    nodes.eliminate_dead_code()
    graph.recompile()
    return graph


def _written(graph: GraphModule) -> set[Node]:
    """What is written after it was made, itself or by way of a view, and what writes."""
    found: set[Node] = set()
    for node in reversed(graph.graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            found.add(node)
        if any(_passes_on(user, node) and user in found for user in node.users):
            found.add(node)
    return found


def _passes_on(user: Node, node: Node) -> bool:
    """Whether what an operator gives, or writes, is memory of this one of its arguments."""
    if not isinstance(user.target, torch._ops.OpOverload):
        return True  # one of several results
    arguments = user.target._schema.arguments
    given = {**dict(zip((a.name for a in arguments), user.args, strict=False)), **user.kwargs}
    return any(a.alias_info is not None and given.get(a.name) is node for a in arguments)


class PackedWeights:
    """Weights once more, in the layout that MKL's products read in one stream: products of few
    rows with weights that lie outside the core's own cache are a fifth to a third faster.

    A layout is for one number of rows. An engine's own; its traces share them.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, int, int], Tensor] = {}

    def use(self, graph: GraphModule) -> list[Tensor]:
        """Rewrite the products of a lean graph; what it is given from now on behind its inputs."""
        if not torch.backends.mkl.is_available():
            return []
        nodes, given, products = graph.graph, list[Tensor](), _products(graph)
        if sum({weight.data_ptr(): weight.nbytes for *_, weight in products}.values()) > MOST:
            return []
        (*_, last) = nodes.find_nodes(op="placeholder")
        for node, rows, weight in products:
            key = (weight.data_ptr(), *weight.shape, rows)
            if key not in self._made:
                self._made[key] = MKL._mkl_reorder_linear_weight(weight.contiguous(), rows)
            given.append(self._made[key])
            plain = f"packed_{node.name}"
            graph.register_buffer(plain, weight)
            with nodes.inserting_after(last):
                last = nodes.placeholder(f"weight_{node.name}")
            with nodes.inserting_before(node):
                args = (node.args[0], last, nodes.get_attr(plain), None, rows)
                node.replace_all_uses_with(nodes.call_function(MKL._mkl_linear.default, args))
        nodes.eliminate_dead_code()
        graph.recompile()
        return given


def _products(graph: GraphModule) -> list[tuple[Node, int, Tensor]]:
    """Products of a few rows with a constant in fp32: where, how many rows, the weight [O, C]."""
    found = []
    for node in graph.graph.find_nodes(op="call_function", target=ATEN.mm.default):
        rows, constant = node.meta["shape"][0], node.args[1]
        if constant.op == "get_attr" and rows in ROWS:
            weight: Tensor = getattr(graph, constant.target)
            if weight.dtype == torch.float32:
                found.append((node, rows, weight.t()))
    return found
