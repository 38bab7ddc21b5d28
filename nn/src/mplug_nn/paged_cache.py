"""Static caches whose rows are in pages of constant size, which all texts of a batch share.

B texts, P pages of a text, R rows of a page, N pages of a pool, T = P R rows that a text can have.

Row p of a text is row p modulo R of its page p // R. A table [B, P] on the device has the numbers of its pages, so the
shapes and addresses of a step never change. All caches of a model have the same table. Page 0 is spare: it belongs to
no text, the free entries of a table name it, and texts that have ended write to it.
"""

import torch
from torch import Tensor

from mplug_nn.cache import Cache, CacheSize
from mplug_nn.specification import StaticKeys
from mplug_nn.static_cache import Clock, StaticCache, static_keys


class PagedClock(Clock):
    """The positions of a batch, and the pages of its texts: `table` [B, P], int64, and `page_size` R.

    `prompt_rows` [S] are the rows of the pool, counted over all pages, that a prompt of S positions writes.
    """

    def __init__(
        self, num_samples: int, device: torch.device | str, num_pages: int, page_size: int, pages_of_text: int
    ) -> None:
        super().__init__(num_samples, device)
        self.num_pages, self.page_size = num_pages, page_size
        self.table = torch.zeros(num_samples, pages_of_text, dtype=torch.int64, device=device)
        self.prompt_rows = torch.zeros(0, dtype=torch.int64, device=device)
        self.seen = pages_of_text
        """The first pages of each text, which attention receives; all rows of the texts are in them."""
        self._of_pages: tuple[StaticKeys, Tensor] | None = None

    @property
    def pages_of_text(self) -> int:
        """P."""
        return self.table.shape[1]

    def tick(self) -> None:
        """The next call brings the next position of each text; the table has a page for it."""
        super().tick()
        if self._of_pages is not None:
            self._of_pages = self._new_keys_of_pages()

    def keys_of_pages(self) -> tuple[StaticKeys, Tensor]:
        """(what cores need to know about the rows of texts, the rows [B] of the pool for the new positions).

        The rows are in the order of their positions, as `rows_of_pages` returns them.
        """
        if self._of_pages is None:
            self._of_pages = self._new_keys_of_pages()
        return self._of_pages

    def _new_keys_of_pages(self) -> tuple[StaticKeys, Tensor]:
        size = self.page_size
        pages = self.table.gather(1, (self.positions // size)[:, None])[:, 0]
        return static_keys(self.positions, self.seen * size), pages * size + self.positions.remainder(size)

    def cache(self, size: CacheSize, reach: int | None) -> StaticCache:
        """An empty cache of these texts: paged, or with rows of its own for each text if only a window is kept."""
        return PagedCache(size, self) if reach is None else super().cache(size, reach)


class PagedCache(StaticCache):
    """The rows of one attention in pools [N, R, ...]."""

    def __init__(self, size: CacheSize, clock: PagedClock) -> None:
        super().__init__(size, None, clock)
        self.paged = clock

    def keys(self) -> tuple[StaticKeys, Tensor]:
        """`PagedClock.keys_of_pages`."""
        return self.paged.keys_of_pages()

    def extend(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Add the rows of one new position of each text; returns the first rows of all texts, each [B, seen R, ...].

        The results are copies, in the order of positions, as those of a cache without pages.
        """
        self.static_keys, places = self.keys()
        for pool, x in zip(self._buffers, rows, strict=True):
            pool.flatten(0, 1)[places] = x[:, 0]
        table = self.paged.table[:, : self.paged.seen]
        return tuple(rows_of_pages(pool, table) for pool in self._buffers)

    def grow(self, positions: int) -> None:
        """The pool is constant."""
        raise ValueError("a paged cache does not grow")

    def replace_sample(self, sample: int, other: Cache) -> None:
        """The rows of a prompt are in its pages already."""
        self.take_constants(other)

    def write_prompt(self, rows: tuple[Tensor, ...]) -> None:
        """Write the rows of a prompt, each [1, S, ...], to the rows `prompt_rows` of the pool."""
        clock = self.paged
        if not self._buffers:
            self._buffers = [x.new_zeros(clock.num_pages, clock.page_size, *x.shape[2:]) for x in rows]
        for pool, x in zip(self._buffers, rows, strict=True):
            pool.flatten(0, 1)[clock.prompt_rows] = x[0]

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """The rows of the pages `targets` become those of the pages `sources`."""
        for pool in self._buffers:
            pool[targets] = pool[sources]


class PagedPrompt(Cache):
    """The cache of one attention while a prompt is computed: the prompt's rows go to the pages of another cache."""

    def __init__(self, size: CacheSize, pool: PagedCache) -> None:
        super().__init__(size)
        self.pool = pool

    def extend(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Write all rows of a prompt, each [1, S, ...], which sees them itself."""
        self.pool.write_prompt(rows)
        return rows


def rows_of_pages(pool: Tensor, table: Tensor) -> Tensor:
    """The rows of texts, in the order of their positions: a pool [N, R, ...] and a table [B, P] -> [B, P R, ...]."""
    return pool[table].flatten(1, 2)
