"""Muon for matrices, AdamW for the rest, and one schedule for both.

Sources: Muon (Keller Jordan, 2024; Newton-Schulz quintic), figures in docs/LOG.md.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nanodflash.models.layers import Part

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """[n, r, c] with singular values pushed towards 1, all matrices at once."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Momentum, orthogonalised, for 2-D weights. Fused matrices are taken part by part."""

    def __init__(self, parts: Iterable[Part], weight_decay: float = 0.01) -> None:
        self.weight_decay = weight_decay
        groups: dict[tuple[int, ...], list[Part]] = {}
        for part in parts:
            groups.setdefault(tuple(part.view().shape), []).append(part)
        self.groups = list(groups.values())
        self.momenta = [torch.stack([torch.zeros_like(p.view()) for p in g]) for g in self.groups]

    @torch.no_grad()
    def step(self, lr: float, momentum: float = 0.95) -> None:
        """One update from the gradients, Nesterov momentum, decoupled weight decay."""
        for group, buffer in zip(self.groups, self.momenta, strict=True):
            grads = torch.stack([p.view(p.parameter.grad) for p in group])
            buffer.lerp_(grads, 1 - momentum)
            update = orthogonalize(grads.lerp(buffer, momentum))
            rows, columns = update.shape[1:]
            scale = lr * max(1.0, rows / columns) ** 0.5
            for part, delta in zip(group, update, strict=True):
                part.view().mul_(1 - lr * self.weight_decay).sub_(delta, alpha=scale)

    def state_dict(self) -> list[Tensor]:
        """The momenta, in the order of the groups."""
        return self.momenta

    def load_state_dict(self, state: list[Tensor]) -> None:
        """Take momenta saved by `state_dict` of the same model."""
        for buffer, saved in zip(self.momenta, state, strict=True):
            buffer.copy_(saved)


class Optimizer:
    """Muon on the layers' and `fc`'s matrices, AdamW on embeddings and norms.

    Args:
        parts: the model's checkpoint parts; parameters that need no gradient are left alone.
    """

    def __init__(
        self, parts: dict[str, Part], lr_matrix: float = 0.02, lr_rest: float = 3e-3
    ) -> None:
        matrices: list[Part] = []
        rest: list[Part] = []
        for name, part in parts.items():
            is_matrix = part.parameter.dim() == 2 and not name.startswith(("model.embed", "lm_"))
            (matrices if is_matrix else rest).append(part)
        self.lr_matrix, self.lr_rest = lr_matrix, lr_rest
        self.parameters: list[nn.Parameter] = [p.parameter for p in rest]
        self.matrices = list({id(p.parameter): p.parameter for p in matrices}.values())
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(self.parameters, lr=lr_rest, betas=(0.9, 0.95))
        for group in self.adam.param_groups:
            group["weight_decay"] = 0.0

    def step(self, factor: float) -> None:
        """Update with learning rates times `factor`, then drop the gradients."""
        self.muon.step(self.lr_matrix * factor)
        for group in self.adam.param_groups:
            group["lr"] = self.lr_rest * factor
        self.adam.step()
        for parameter in self.parameters + self.matrices:
            parameter.grad = None

    def state_dict(self) -> dict[str, object]:
        """Both optimizers' state."""
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore what `state_dict` gave."""
        self.muon.load_state_dict(state["muon"])  # type: ignore[arg-type]
        self.adam.load_state_dict(state["adam"])  # type: ignore[arg-type]


def schedule(step: int, progress: float, flat: float) -> float:
    """Warm-up over 20 steps, flat until `flat` of the run, then linear to 2 %.

    Args:
        progress: share of the run done, 0..1.
    """
    decay = 1.0 if progress < flat else 1 - 0.98 * (progress - flat) / (1 - flat)
    return min(1.0, (step + 1) / 20) * max(decay, 0.02)
