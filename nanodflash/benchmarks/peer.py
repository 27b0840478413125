"""The reference implementation, the PyPI package `dflash`, on the same weights.

It runs in a process of its own and idles while this engine runs: two pools of OpenMP threads in
one process put each other's workers to sleep, and both would be measured slower than they are.
"""

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

from nanodflash.llm import BUNDLED


class Peer:
    """Decodes prompt ids greedily with the reference, in fp32 on a CPU.

    Raises:
        ImportError: `dflash` or transformers is not installed (the `dev` extra).
    """

    def __init__(self, model: str, draft: str, stop_ids: list[int], max_new: int) -> None:
        folders = (
            BUNDLED / role if name == "bundled" else Path(name)
            for role, name in (("target", model), ("draft", draft))
        )
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, *folders, stop_ids, max_new)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()  # this end here would hide that the process has died
        try:
            told = self._pipe.recv()
        except EOFError:
            told = "its process died while it loaded"
        if told is not None:
            raise ImportError(f"the reference cannot run: {told}")

    def __call__(self, prompt: list[int]) -> tuple[list[int], int]:
        """New ids, and target forwards without prefill."""
        self._pipe.send(prompt)
        ids, forwards = self._pipe.recv()
        return ids, forwards

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pipe.send(None)
        self._process.join()


def _serve(pipe: Connection, target: Path, draft: Path, stop_ids: list[int], max_new: int) -> None:
    """The other process: load, then answer prompts until None."""
    try:
        import torch
        from dflash.model import DFlashDraftModel, dflash_generate
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        pipe.send(str(error))
        return
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    drafter = DFlashDraftModel.from_pretrained(draft, dtype=torch.float32).eval()
    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    model.register_forward_hook(count)  # the reference's own statistics need CUDA
    pipe.send(None)
    while (prompt := pipe.recv()) is not None:
        forwards = 0
        ids = torch.tensor([prompt])
        output = dflash_generate(drafter, model, ids, max_new, stop_ids, temperature=0.0)
        pipe.send((output[0, len(prompt) :].tolist(), forwards - 1))
