"""Which pages hold the rows of which text. Imports no torch; all ranks of a layout compute the same.

A page belongs to the texts that began with the same prompt until one of them writes to it: that text then gets a copy
(copy on write). The prompt that was computed last holds its pages too, so that a text that repeats it shares them; when
no page is free, it gives them up.
"""

from collections.abc import Iterable, Sequence

SPARE = 0
"""The page of no text."""


class NoPage(Exception):
    """All pages belong to texts."""


class Pages:
    """The pages 1 to `num_pages` of `page_size` rows each, for texts in `num_lanes` lanes."""

    def __init__(self, num_pages: int, page_size: int, num_lanes: int) -> None:
        self.page_size = page_size
        self.free = list(range(num_pages, SPARE, -1))
        """The free pages; the last one is given out next."""
        self.of_lane: list[list[int]] = [[] for _ in range(num_lanes)]
        """The pages of each lane's text, in the order of its positions."""
        self.of_prompt: list[int] = []
        """Those of the last prompt."""
        self.copies: list[tuple[int, int]] = []
        """(source, target) of pages whose rows must be copied before the next step; the caller clears it."""
        self.changed: set[int] = set()
        """Lanes whose pages are others since the caller has cleared it."""
        self._holders = [0] * (num_pages + 1)

    def needed(self, length: int) -> int:
        """The number of pages of a text of this many positions."""
        return -(-length // self.page_size)

    def begin(self, lane: int, length: int) -> None:
        """Give a lane the pages of a new prompt, which becomes the last one; NoPage if there are too few."""
        self.forget_prompt()
        if self.needed(length) > len(self.free):
            raise NoPage
        self.of_prompt = [self._take() for _ in range(self.needed(length))]
        self.share(lane)

    def share(self, lane: int) -> None:
        """Give a lane the pages of the last prompt."""
        self.of_lane[lane] = [*self.of_prompt]
        self.changed.add(lane)
        for page in self.of_prompt:
            self._holders[page] += 1

    def write(self, lane: int, position: int) -> None:
        """Make sure that the text of a lane alone holds the page of a position; NoPage if there is none."""
        own, index = self.of_lane[lane], position // self.page_size
        if index == len(own):
            own.append(self._found())
            self.changed.add(lane)
        elif self._holders[own[index]] > 1:
            page = None if self.free else self._given_up(own[index])
            if page is None:
                page = self._found()
                self.copies.append((own[index], page))
                self._leave([own[index]])
                own[index] = page
                self.changed.add(lane)

    def end(self, lane: int) -> None:
        """The text of a lane has ended; pages that no other text holds are free, and receive no copy any more."""
        self._leave(self.of_lane[lane])
        self.copies = [(source, target) for source, target in self.copies if self._holders[target]]
        self.of_lane[lane] = []
        self.changed.add(lane)

    def forget_prompt(self) -> None:
        """The last prompt gives up its pages."""
        self._leave(self.of_prompt)
        self.of_prompt = []

    def available(self, ended: Iterable[int] = (), *, without_prompt: bool) -> int:
        """The number of free pages when some lanes have ended, and when the last prompt has given up its pages."""
        lists = [self.of_lane[lane] for lane in ended] + ([self.of_prompt] if without_prompt else [])
        left = dict[int, int]()
        for page in (page for pages in lists for page in pages):
            left[page] = left.get(page, self._holders[page]) - 1
        return len(self.free) + sum(holders == 0 for holders in left.values())

    def _given_up(self, page: int) -> int | None:
        """The page, if its text is the only one left when the last prompt gives up its pages."""
        self.forget_prompt()
        return page if self._holders[page] == 1 else None

    def _found(self) -> int:
        if not self.free:
            self.forget_prompt()
        return self._take()

    def _take(self) -> int:
        if not self.free:
            raise NoPage
        page = self.free.pop()
        self._holders[page] = 1
        return page

    def _leave(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self.free.append(page)
