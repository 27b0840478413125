"""Every device operation, as plain torch: the executable definition; and which one runs (`Ops`).

A faster implementation is tested against these. They take and return tensors, hold no state, and
make no host sync, so that a step made of them can be captured. Internal sums are fp32, or fp64
when the model is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanodflash.ops.rows import (
    Attend as Attend,
)
from nanodflash.ops.rows import (
    Rotary as Rotary,
)
from nanodflash.ops.rows import (
    add_rms_norm as add_rms_norm,
)
from nanodflash.ops.rows import (
    attention as attention,
)
from nanodflash.ops.rows import (
    attention_mask as attention_mask,
)
from nanodflash.ops.rows import (
    inject_rows as inject_rows,
)
from nanodflash.ops.rows import (
    norm_rope as norm_rope,
)
from nanodflash.ops.rows import (
    norm_rope_write as norm_rope_write,
)
from nanodflash.ops.rows import (
    paged_attention as paged_attention,
)
from nanodflash.ops.rows import (
    rms_norm as rms_norm,
)
from nanodflash.ops.rows import (
    row_places as row_places,
)
from nanodflash.ops.rows import (
    silu_mul as silu_mul,
)
from nanodflash.ops.rows import (
    split_heads as split_heads,
)
from nanodflash.ops.rows import (
    write_rows as write_rows,
)
from nanodflash.ops.tokens import (
    accept_commit as accept_commit,
)
from nanodflash.ops.tokens import (
    argmax as argmax,
)
from nanodflash.ops.tokens import (
    block_counts as block_counts,
)
from nanodflash.ops.tokens import (
    choose as choose,
)
from nanodflash.ops.tokens import (
    count_accepted as count_accepted,
)
from nanodflash.ops.tokens import (
    cut_run as cut_run,
)
from nanodflash.ops.tokens import (
    filter_logits as filter_logits,
)
from nanodflash.ops.tokens import (
    keyed_gumbel as keyed_gumbel,
)
from nanodflash.ops.tokens import (
    mask_ids as mask_ids,
)
from nanodflash.ops.tokens import (
    penalise as penalise,
)
from nanodflash.ops.tokens import (
    propose as propose,
)
from nanodflash.ops.tokens import (
    top_logprobs as top_logprobs,
)


@dataclass(frozen=True)
class Ops:
    """The implementation of every operation that has a fast one. An engine's own; its models get
    it with `prepare`.
    """

    rms_norm: Callable[..., Tensor] = rms_norm
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]] = add_rms_norm
    silu_mul: Callable[..., Tensor] = silu_mul
    norm_rope_write: Callable[..., Tensor] = norm_rope_write
    inject_rows: Callable[..., None] = inject_rows
    attention: Callable[..., Attend] = attention
    argmax: Callable[..., Tensor] = argmax
    choose: Callable[..., Tensor] = choose
    propose: Callable[..., Tensor] = propose
    accept_commit: Callable[..., Tensor] = accept_commit


REFERENCE = Ops()
NAMES = tuple(vars(REFERENCE))


def kernel_ops(reference: tuple[str, ...] = ()) -> Ops:
    """The Triton kernels, but the definitions of the operations named."""
    from nanodflash.kernels import accept, activation, norm, norm_rope_write, sample
    from nanodflash.kernels import attention as paged

    def attention(
        pages: Tensor, start: Tensor, size: int, causal: bool, window: int | None, like: Tensor
    ) -> Attend:
        return lambda q, rows: paged.paged_attention(q, rows, pages, start, causal, window)

    fast: dict[str, Any] = {
        "rms_norm": norm.rms_norm,
        "add_rms_norm": norm.add_rms_norm,
        "silu_mul": activation.silu_mul,
        "norm_rope_write": norm_rope_write.norm_rope_write,
        "inject_rows": norm_rope_write.inject_rows,
        "attention": attention,
        "argmax": sample.argmax,
        "choose": sample.choose,
        "propose": sample.propose,
        "accept_commit": accept.accept_commit,
    }
    return Ops(**{name: op for name, op in fast.items() if name not in reference})
