"""What is done to a recorded list of operators before it is traced: fewer of them, faster ones."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

ROWS = range(8, 17)  # of products with packed weights: with fewer or more rows nothing is gained
MOST_BYTES = 64 << 20  # packed: a larger model's products wait for memory, not for its layout
ATEN, MKL = torch.ops.aten, torch.ops.mkl
UNTOLD = ATEN._unsafe_view.default


def lean(graph: GraphModule) -> GraphModule:
    """Take out what need not be done at every replay: what depends on weights alone, views of
    views, and views that are there already.
    """
    nodes = graph.graph
    reshapes = (ATEN.view.default, UNTOLD)
    views = (*reshapes, ATEN.select.int, ATEN.slice.Tensor, ATEN.unsqueeze.default)
    seen: dict[tuple[object, str], Node] = {}
    written = _written(graph)
    assert all(node.op != "get_attr" for node in written), "what a step writes must be an input"
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
    if not isinstance(user.target, torch._ops.OpOverload) or user.target is UNTOLD:
        return True  # one of several results, or a view whose schema does not say so
    arguments = user.target._schema.arguments
    given = {**dict(zip((a.name for a in arguments), user.args, strict=False)), **user.kwargs}
    return any(a.alias_info is not None and given.get(a.name) is node for a in arguments)


class PackedWeights:
    """Weights once more, in the layout that MKL's products read in one stream: products of few
    rows with weights that lie outside the core's own cache are a tenth to a fifth faster.

    A layout is for one number of rows. An engine's own; its traces share them.
    """

    def __init__(self) -> None:
        # The plain weight is kept too: while it lives its address is nobody else's.
        self._made: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def use(self, graph: GraphModule) -> list[Tensor]:
        """Rewrite the products of a lean graph, for the rows that it was recorded with.

        Returns:
            What it is given from now on behind its inputs, in MKL's own layout: never to be cloned.
        """
        if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
            return []
        nodes, products = graph.graph, _products(graph)
        fresh = {key: node for node, key in products.items() if key not in self._made}
        plain = {key: _weight(graph, node) for key, node in fresh.items()}
        known = [weight for weight, _ in self._made.values()]
        if sum(weight.nbytes for weight in (*known, *plain.values())) > MOST_BYTES:
            return []
        for key, weight in plain.items():
            self._made[key] = weight, MKL._mkl_reorder_linear_weight(weight.contiguous(), key[0])
        (*_, last) = nodes.find_nodes(op="placeholder")
        inputs: dict[tuple[int, ...], Node] = {}
        for node, key in products.items():
            if key not in inputs:
                name = f"packed{len(inputs)}"
                graph.register_buffer(f"{name}_plain", self._made[key][0])
                with nodes.inserting_after(last):
                    last = inputs[key] = nodes.placeholder(name)
            with nodes.inserting_before(node):
                same = nodes.get_attr(f"{inputs[key].target}_plain")
                args = (node.args[0], inputs[key], same, None, key[0])
                node.replace_all_uses_with(nodes.call_function(MKL._mkl_linear.default, args))
        nodes.eliminate_dead_code()
        graph.recompile()
        return [self._made[key][1] for key in inputs]


def _products(graph: GraphModule) -> dict[Node, tuple[int, ...]]:
    """Products of a few rows with a constant in fp32, and for each the rows and which weight."""
    found = {}
    for node in graph.graph.find_nodes(op="call_function", target=ATEN.mm.default):
        rows = node.meta["shape"][0]
        if node.args[1].op == "get_attr" and rows in ROWS:
            weight = _weight(graph, node)
            if weight.dtype == torch.float32:
                found[node] = (rows, weight.data_ptr(), *weight.shape, *weight.stride())
    return found


def _weight(graph: GraphModule, product: Node) -> Tensor:
    """[O, C] of a product [R, C] x [C, O]."""
    constant: Any = product.args[1]
    made: Tensor = getattr(graph, constant.target)
    return made.t()
