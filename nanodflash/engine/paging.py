"""Which pages are whose. One page id stands for the same tokens in both pools."""

from dataclasses import dataclass


class OutOfPages(RuntimeError):
    """The pool cannot give what was asked for."""


@dataclass(frozen=True)
class PageStats:
    """Pages by use; the dummy page is not counted. free + cached + live = total."""

    free: int
    cached: int
    live: int
    total: int


class PagePool:
    """Hands out page ids 1 .. num_pages-1; page 0 is the dummy page and nobody's."""

    def __init__(self, num_pages: int) -> None:
        self.total = num_pages - 1
        self._free = list(range(self.total, 0, -1))
        self._live: set[int] = set()

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages; OutOfPages names wanted, free and total."""
        if count > len(self._free):
            raise OutOfPages(f"wanted {count} pages, {len(self._free)} of {self.total} are free")
        taken = [self._free.pop() for _ in range(count)]
        self._live.update(taken)
        return taken

    def release(self, pages: list[int]) -> None:
        """Give pages back; each must be live."""
        for page in pages:
            self._live.remove(page)
            self._free.append(page)

    def stats(self) -> PageStats:
        """Count the pages."""
        return PageStats(len(self._free), 0, len(self._live), self.total)
