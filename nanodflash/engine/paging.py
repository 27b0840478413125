"""Which pages are whose, and which are kept for their contents.

One page id stands for the same tokens in both pools, so a page is shared, cached, evicted or
freed in both at once. A full page of committed tokens can be published: its key is the page
before it and its own token ids, compared as they are. A request that holds a cached page holds
all pages before it, and gives them back after it; so the oldest idle page is always one that
no cached page hangs on.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

Key = tuple[int, tuple[int, ...]]  # the page before (0: none), the token ids


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

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.total, self.page_size = num_pages - 1, page_size
        self._free = list(range(self.total, 0, -1))
        self._owners: dict[int, int] = {}  # live page -> how many sequences hold it
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, held by none; oldest first
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: free ones, and cached ones to evict."""
        return len(self._free) + len(self._idle)

    def owners(self, page: int) -> int:
        """How many sequences hold a page."""
        return self._owners.get(page, 0)

    def match(self, ids: Sequence[int]) -> list[int]:
        """Take the longest cached run of full pages at the start of `ids`.

        The last id is never covered: its row must be computed to continue from it.
        """
        taken: list[int] = []
        size = self.page_size
        for first in range(0, (len(ids) - 1) // size * size, size):
            key = (taken[-1] if taken else 0, tuple(ids[first : first + size]))
            page = self._page_of.get(key)
            if page is None:
                break
            taken.append(page)
        for page in taken:
            self._idle.pop(page, None)
            self._owners[page] = self._owners.get(page, 0) + 1
        return taken

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, evicting the least recently used cached ones where needed.

        Raises:
            OutOfPages: with wanted, available and total; nothing is taken then.
        """
        if count > self.available:
            raise OutOfPages(
                f"wanted {count} pages, {self.available} of {self.total} are available"
            )
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                del self._page_of[self._key_of.pop(page)]
            self._owners[page] = 1
            taken.append(page)
        return taken

    def publish(self, before: int, ids: Sequence[int], page: int) -> bool:
        """Offer a full page for sharing; False where another page has that content already.

        Args:
            before: the published page in front of it, 0 for the first.
            ids:    its `page_size` token ids, all committed and written in both pools.
        """
        key = (before, tuple(ids))
        if key in self._page_of:
            return False
        self._page_of[key], self._key_of[page] = page, key
        return True

    def release(self, pages: Sequence[int]) -> None:
        """Give a sequence's pages back, in the order of positions; cached ones stay, idle."""
        for page in reversed(pages):
            if self._owners[page] > 1:
                self._owners[page] -= 1
                continue
            del self._owners[page]
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def stats(self) -> PageStats:
        """Count the pages."""
        return PageStats(len(self._free), len(self._idle), len(self._owners), self.total)

    def check(self) -> None:
        """Raise unless every page is exactly one of free, idle, live: a lost page is a bug."""
        pages = sorted([*self._free, *self._idle, *self._owners])
        if pages != list(range(1, self.total + 1)) or not set(self._idle) <= set(self._key_of):
            raise RuntimeError(f"pages are lost or doubled: {self.stats()}")
