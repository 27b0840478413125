"""Compile what the engine would launch, without a GPU: `python tests/kernels/aot.py --arch 90`.

Each variant is a call of a public wrapper with shapes of tensors that hold nothing; what it
launches is recorded and compiled ahead of time, so that the table cannot drift from the wrappers.
Prints one JSON object a line: variant, kernel, arch, registers, stack, shared, dots.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanodflash.kernels import accept, activation, attention, filter, norm, norm_rope_write, sample

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
}
PAGE, BLOCK, WIDEST = 64, 16, 640  # page size, block size, pages a sequence


class Shape(NamedTuple):
    """A model: query and K/V heads, head dim, hidden and intermediate size, vocabulary."""

    heads: int
    kv_heads: int
    dim: int
    hidden: int
    width: int
    vocab: int


SHAPES = {
    "bundled": Shape(6, 3, 32, 192, 512, 2048),
    "0.6B": Shape(16, 8, 128, 1024, 3072, 151936),
    "8B": Shape(32, 8, 128, 4096, 12288, 151936),
    "14B": Shape(40, 8, 128, 5120, 17408, 151936),
    "32B": Shape(64, 8, 128, 5120, 25600, 151936),
}


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def ids(*shape: int) -> Tensor:
    """The same, of int64."""
    return new(*shape, dtype=torch.int64)


def attend(
    shape: Shape,
    batch: int,
    size: int,
    causal: bool,
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Attention of `size` rows a request over a full page table."""
    rows = new(2, PAGE, 2, shape.kv_heads, shape.dim, dtype=dtype)
    q = new(batch, size, shape.heads, shape.dim, dtype=dtype)
    attention.paged_attention(q, rows, ids(batch, WIDEST), ids(batch), causal, window)


def layer(shape: Shape, batch: int, size: int) -> None:
    """The other kernels of a layer."""
    tokens = batch, size
    rows = new(2, PAGE, 2, shape.kv_heads, shape.dim)
    turn = new(*tokens, 1, shape.dim), new(*tokens, 1, shape.dim)
    qkv = new(*tokens, shape.heads + 2 * shape.kv_heads, shape.dim)
    unit = new(shape.dim)
    norm_rope_write.norm_rope_write(qkv, unit, unit, 1e-6, turn, rows, ids(*tokens))
    h = new(*tokens, shape.hidden)
    norm.rms_norm(h, new(shape.hidden), 1e-6)
    norm.add_rms_norm(h, h, new(shape.hidden), 1e-6)
    activation.silu_mul(new(*tokens, 2 * shape.width))


def inject(shape: Shape, batch: int, size: int, layers: int) -> None:
    """The context side of a drafter."""
    rows = new(layers, 2, PAGE, 2, shape.kv_heads, shape.dim)
    turn = new(batch, size, 1, shape.dim), new(batch, size, 1, shape.dim)
    kv = new(batch, size, layers, 2 * shape.kv_heads, shape.dim)
    norms = new(layers, shape.dim)
    norm_rope_write.inject_rows(kv, norms, 1e-6, turn, rows, ids(batch, size))


def vocabulary(shape: Shape, batch: int, size: int) -> None:
    """Argmax, the seeded choice and the proposals."""
    logits = new(batch, size, shape.vocab)
    real = new(batch, dtype=torch.float32)
    sample.argmax(logits)
    params = real, ids(batch), real, real, ids(batch), ids(batch, size)
    sample.choose(logits, *params)
    sample.propose(logits, *params, 0.3)
    sample.choose(logits.to(torch.float32), *params)  # after penalties
    filter.filter_thresholds(logits, *params[:4])


def commit(shape: Shape, batch: int, size: int, counted: bool) -> None:
    """Acceptance and commit."""
    slots, counts = ids(batch + 1), None
    if counted:
        counts = new(batch + 1, shape.vocab, dtype=torch.int32)
    accept.accept_commit(
        ids(batch),
        ids(batch, size - 1),
        ids(batch, size),
        *[slots] * 6,
        ids(batch + 1, 16),
        ids(batch + 1, WIDEST * PAGE),
        counts,
    )


def variants() -> dict[str, Callable[[], None]]:
    """Name -> a call; everything that the engine launches for these models."""
    table: dict[str, Callable[[], None]] = {}
    for name, shape in SHAPES.items():
        for size in (BLOCK, BLOCK // 2, 1):
            for batch in (1, 32):  # many splits, and one
                key = f"{name} verify b{batch} s{size}"
                table[key] = lambda s=shape, b=batch, n=size: attend(s, b, n, True)
        for size in (100, 512):
            key = f"{name} prefill t{size}"
            table[key] = lambda s=shape, n=size: attend(s, 1, n, True)
        for batch in (1, 32):
            for window in (None, 2048):
                key = f"{name} draft b{batch}" + (" windowed" if window else "")
                table[key] = lambda s=shape, b=batch, w=window: attend(s, b, BLOCK, False, w)
        table[f"{name} verify fp32"] = lambda s=shape: attend(
            s, 1, BLOCK, True, dtype=torch.float32
        )
        table[f"{name} draft causal windowed"] = lambda s=shape: attend(s, 1, BLOCK, True, 2048)
        table[f"{name} layer"] = lambda s=shape: layer(s, 1, BLOCK)
        table[f"{name} inject"] = lambda s=shape: inject(s, 1, BLOCK, 5)
    for name in ("bundled", "8B"):  # the vocabulary is that of all the others
        table[f"{name} vocabulary"] = lambda s=SHAPES[name]: vocabulary(s, 1, BLOCK)
        for size in (BLOCK, BLOCK // 2, 1):
            for counted in (False, True):
                key = f"{name} commit s{size}" + (" counted" if counted else "")
                table[key] = lambda s=SHAPES[name], n=size, c=counted: commit(s, 1, n, c)
    return table


# Every kernel and every tile of the attention; then the least that is worth a look.
FEW = [
    "bundled verify b1 s16",
    "bundled draft b32 windowed",
    "8B verify b1 s1",
    "8B verify b1 s16",
    "8B prefill t512",
    "14B draft b1 windowed",
    "32B verify b32 s16",
    "8B layer",
    "8B inject",
    "8B vocabulary",
    "8B commit s16 counted",
]
FEWEST = ["8B verify b1 s16", "14B draft b1 windowed", "8B verify b1 s1"]


class Launch(NamedTuple):
    """What a wrapper launched: a kernel and all that decides its code."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attrs: dict[tuple[int], list[list[Any]]]
    options: dict[str, Any]


def describe(kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Launch:
    """Specialise as a launch does: one is a constant, multiples of 16 and pointers are aligned,
    but for the parameters that the kernel says are not to be looked at.
    """
    options = {key: named.pop(key) for key in set(named) - set(kernel.arg_names)}
    values = dict(zip(kernel.arg_names, args, strict=False)) | named
    assert list(values) == kernel.arg_names
    signature, constants, attrs = {}, {}, {}
    for i, (param, value) in enumerate(zip(kernel.params, values.values(), strict=True)):
        whole = isinstance(value, int) and not param.do_not_specialize
        if param.is_constexpr or (whole and value == 1):
            signature[param.name], constants[param.name] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[param.name] = TYPES[value.dtype]
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32" if abs(value) < 2**31 else "i64"
        aligned = not param.do_not_specialize_on_alignment
        if aligned and (isinstance(value, Tensor) or (whole and value % 16 == 0)):
            attrs[(i,)] = [["tt.divisibility", 16]]
    return Launch(kernel, signature, constants, attrs, options)


def record(call: Callable[[], None]) -> list[Launch]:
    """The launches of a call, none of which runs."""
    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        assert all(0 < size <= 65535 for size in grid[1:]), grid
        launches.append(describe(self, args, named))

    before, JITFunction.run = JITFunction.run, run
    try:
        call()
    finally:
        JITFunction.run = before
    return launches


def variants_of(shape: Shape, size: int) -> set[str]:
    """What attention over a prompt chunk of this many tokens launches."""
    launches = record(lambda: attend(shape, 1, size, True))
    return {repr((launch.kernel.__name__, *launch[1:])) for launch in launches}


def not_ahead(most: int, step: int) -> dict[str, list[int]]:
    """By model, chunk lengths up to `most` whose variants `ModelSteps.prepare` does not compile."""
    lengths, found = range(1, most + 1, step), dict[str, list[int]]()
    for name, shape in SHAPES.items():
        powers = (min(1 << power, most) for power in range(most.bit_length() + 1))
        ahead = set().union(*(variants_of(shape, length) for length in powers))
        found[name] = [length for length in lengths if not variants_of(shape, length) <= ahead]
    return found


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes a thread."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        out = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", out)
    assert found, out
    return int(found[1]), int(found[2])


def compiled(names: list[str], arch: int, part: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """A row for every kernel of the named variants; one part of several, alike ones once."""
    table, seen = variants(), {}
    for name in names:
        for launch in record(table[name]):
            key = repr((launch.kernel.__name__, *launch[1:]))
            if key not in seen:
                seen[key] = (name, launch)
    for i, (name, launch) in enumerate(seen.values()):
        if i % part[1] != part[0]:
            continue
        source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attrs)
        done = triton.compile(source, GPUTarget("cuda", arch, 32), options=launch.options)
        registers, stack = usage(done.asm["cubin"])
        ptx = done.asm["ptx"]
        yield {
            "variant": name,
            "kernel": launch.kernel.__name__,
            "arch": arch,
            "registers": registers,
            "stack": stack,
            "shared": done.metadata.shared,
            "warps": done.metadata.num_warps,
            "dots": [dot for dot in ("tcgen05.mma", "wgmma", "mma.sync") if dot in ptx],
        }


def main() -> None:
    """Compile what the flags name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--few", action="count", default=0, help="each kernel once; twice: less")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="which of how many")
    parser.add_argument("--not-ahead", type=int, nargs=2, help="most tokens of a chunk, and step")
    args = parser.parse_args()
    if args.not_ahead:
        print(json.dumps(not_ahead(*args.not_ahead)))
        return
    names = (list(variants()), FEW, FEWEST)[args.few]
    for row in compiled(names, args.arch, tuple(args.part)):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET", "0") != "1", "the interpreter compiles nothing"
    main()
