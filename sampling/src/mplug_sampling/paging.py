"""The pages of the caches of lanes: which texts hold them (on the CPU), and their table and rows (on the device)."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mplug import UsageError
from mplug_nn.paged_cache import PagedCache, PagedClock, PagedPrompt
from mplug_sampling.pages import SPARE, NoPage, Pages

PAGE_SIZE = 16
"""Rows of a page. Texts of one prompt copy at most one page each, and each wastes less than one page."""

FEWEST = 8
"""Pages of each text that attention receives at least: it copies them, so long contexts of short texts cost little."""


class Room:
    """Which prompts may begin, one after another: all of them, if each lane has its own rows."""

    def takes(self, prompt: Sequence[int]) -> bool:
        """Whether the next prompt may begin; the room that it takes is gone then."""
        return True


class PagedRoom(Room):
    """The room in pages. A prompt needs those of its rows and of one more; a prompt that repeats the last needs one.

    When no page is free, the last prompt gives up its pages, and a prompt that repeats it needs as many as any other.
    No text has more than `most` pages.
    """

    def __init__(self, pages: Pages, most: int, ended: Iterable[int], last: Sequence[int]) -> None:
        ended = [*ended]
        self.pages, self.most, self.last = pages, most, tuple(last) if pages.of_prompt else ()
        self.with_last = pages.available(ended, without_prompt=False)
        self.without_last = pages.available(ended, without_prompt=True)

    def takes(self, prompt: Sequence[int]) -> bool:
        """Whether the next prompt may begin; the room that it takes is gone then."""
        left = self.with_last - 1 if tuple(prompt) == self.last else -1
        if left < 0:
            left = self.without_last - min(self.pages.needed(len(prompt) + 1), self.most)
        if left < 0:
            return False
        self.last, self.with_last, self.without_last = tuple(prompt), left, left
        return True


class Paging:
    """The pages that the texts of lanes share: `num_tokens` rows, for texts of up to `context` tokens each.

    Attention receives `rows` of each text, or some more.
    """

    def __init__(
        self, num_lanes: int, context: int, rows: int, num_tokens: int, page_size: int, device: torch.device | str
    ) -> None:
        self.pages = Pages(-(-num_tokens // page_size), page_size, num_lanes)
        self.most = self.pages.needed(context)
        """The pages of the longest text."""
        num_pages = len(self.pages.free)
        if num_pages < self.most:
            raise UsageError(
                f"a cache of {num_pages * page_size} tokens has no room for one text of {context} tokens; let it have "
                f"{self.most * page_size} or more, or let texts be shorter"
            )
        of_text = -(-rows // page_size)
        self.clock = PagedClock(num_lanes, device, num_pages + 1, page_size, of_text)
        self._paged: list[PagedCache] = []
        self._table = torch.full((num_lanes, of_text), SPARE)

    @property
    def num_tokens(self) -> int:
        """The rows of all pages."""
        return self.clock.page_size * (self.clock.num_pages - 1)

    def take(self, caches: Sequence[Any], of_prompt: Sequence[Any]) -> list[Any]:
        """The caches in which a prompt is computed, those `of_prompt` or ones that write to the pages of `caches`."""
        self._paged = [cache for cache in caches if isinstance(cache, PagedCache)]
        pairs = zip(caches, of_prompt, strict=True)
        return [PagedPrompt(own.size, own) if isinstance(own, PagedCache) else one for own, one in pairs]

    def room(self, ended: Iterable[int], last: Sequence[int]) -> Room:
        """Answers which prompts may begin once some lanes have ended; `last` is the prompt computed last."""
        return PagedRoom(self.pages, self.most, ended, last)

    def begin(self, lane: int, length: int, *, is_new: bool) -> bool:
        """Give a lane the pages of a prompt; returns whether it must be computed: it is new, or its pages are gone."""
        is_new = is_new or not self.pages.of_prompt
        if is_new:
            self.pages.begin(lane, length)
            of_prompt = torch.tensor(self.pages.of_prompt)[:, None] * self.clock.page_size
            rows = (of_prompt + torch.arange(self.clock.page_size)).flatten()[:length]
            self.clock.prompt_rows = rows.to(self.clock.table.device)
        else:
            self.pages.share(lane)
        return is_new

    def write(self, lane: int, position: int) -> bool:
        """Make sure that a lane's text can write the row of a position; returns whether there is a page."""
        try:
            self.pages.write(lane, position)
        except NoPage:
            return False
        return True

    def see(self, rows: int) -> int:
        """Let attention receive the pages of texts with up to this many rows, or some more; returns their number.

        They are `FEWEST` pages, doubled as often as needed, so that few shapes are recorded.
        """
        found = FEWEST
        while found * self.clock.page_size < rows:
            found *= 2
        self.clock.seen = min(found, self.clock.pages_of_text)
        return self.clock.seen

    def end(self, lane: int) -> None:
        """The text of a lane has ended."""
        self.pages.end(lane)

    def settle(self) -> None:
        """Copy pages, and bring the table to the device, before a step."""
        device = self.clock.table.device
        if self.pages.copies:
            sources, targets = torch.tensor(self.pages.copies, device=device).unbind(1)
            for cache in self._paged:
                cache.copy_pages(sources, targets)
            self.pages.copies = []
        for lane in self.pages.changed:
            own = self.pages.of_lane[lane]
            self._table[lane] = SPARE
            self._table[lane, : len(own)] = torch.tensor(own, dtype=torch.int64)
        if self.pages.changed:
            self.clock.table.copy_(self._table)
            self.pages.changed.clear()
