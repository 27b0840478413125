"""The loop both trainings share: wall-clock schedule, progress line, resumable state."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from nanodflash.models.layers import Part
from nanodflash.train.optim import Optimizer, schedule

SAVE_EVERY = 120.0  # seconds between resumable states
PRINT_EVERY = 10.0


class Trainer:
    """Steps an optimizer for `minutes`, all interruptions excluded, and can start again.

    Args:
        module:  saved and restored whole.
        parts:   what the optimizer updates.
        folder:  holds `state.pt`: weights, optimizer, seconds and steps done.
        minutes: length of the run; the learning rate follows the share of it that is done.
        flat:    share of the run at the full learning rate.
    """

    def __init__(
        self, module: nn.Module, parts: dict[str, Part], folder: Path, minutes: float, flat: float
    ) -> None:
        self.module, self.minutes, self.flat = module, minutes, flat
        self.optimizer = Optimizer(parts)
        self.path = folder / "state.pt"
        self.step, self.seconds, self.history = 0, 0.0, []  # type: ignore[var-annotated]
        folder.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._restore()

    @property
    def progress(self) -> float:
        """Share of the run done, 0..1."""
        return min(1.0, self.seconds / (self.minutes * 60))

    def run(
        self, loss_of: Callable[[int], tuple[torch.Tensor, int]], check: Callable[[], str]
    ) -> None:
        """Train until the minutes are over.

        Args:
            loss_of: step -> (scalar loss, units of work in it: tokens or blocks).
            check:   called at every save; its text joins the history and the progress line.
        """
        last = printed = saved = time.monotonic()
        units, losses = 0, []
        while self.progress < 1:
            loss, count = loss_of(self.step)
            loss.backward()
            self.optimizer.step(schedule(self.step, self.progress, self.flat))
            self.step, units = self.step + 1, units + count
            losses.append(loss.item())
            now = time.monotonic()
            self.seconds, last = self.seconds + now - last, now
            if now - printed > PRINT_EVERY or self.progress >= 1:
                mean, rate = sum(losses) / len(losses), units / (now - printed)
                left = max(0.0, self.minutes - self.seconds / 60)
                print(
                    f"step {self.step}  loss {mean:.4f}  {rate:,.0f}/s  {left:.1f} min left",
                    flush=True,
                )
                printed, units, losses = now, 0, []
            if now - saved > SAVE_EVERY or self.progress >= 1:
                text = check()
                self.history.append((round(self.seconds / 60, 1), self.step, text))
                print(f"  @{self.seconds / 60:.1f} min  {text}", flush=True)
                self.save()
                last = saved = printed = time.monotonic()  # checking is not training

    def save(self) -> None:
        """Write the state so that an interruption at any moment leaves a whole one."""
        state = {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history,
        }
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.path)

    def _restore(self) -> None:
        state = torch.load(self.path)
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.history = state["history"]
        print(f"resumed at step {self.step}, {self.seconds / 60:.1f} min", flush=True)
