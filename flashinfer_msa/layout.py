# SPDX-License-Identifier: Apache-2.0
"""The index-K layouts of index context parallelism, and the sizes of the model and the protocol.

Only this module knows how the ranks share a page of index keys. The device header ``templates/layout.cuh`` is rendered
from the same objects. The launcher receives the numbers when it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

HEAD_DIM = 128
"""Elements of one query or key vector."""
NUM_HEADS = 4
"""Index heads of the model. Every rank holds the queries of all heads."""
BLOCK_TOKENS = 128
"""Context tokens in a B128 block, the unit that attention selects."""
TOP_K = 16
"""Blocks selected per token and head."""
MAX_BLOCKS = 8192
"""Maximum candidate blocks per token."""
MAX_SCORE_COLUMNS = 12288
"""A score plane that a selection reads has fewer columns than this."""
NUM_SLOT_SETS = 3
"""Receive slot sets. Successive layers use them in rotation."""
ROW_WORDS = 33
"""int32 words of a carrier row or legacy receive row: 16 scores, 16 ids, one ready flag."""
TAGGED_WORDS = 32
"""int64 words of a tagged receive row."""
MAX_QUERY_LEN = 8
"""Maximum query tokens per request in a decode launch."""
QUERY_TILE_ROWS = 8
"""Query rows, one per token and head, that the decode scorer multiplies together."""
MAX_QUERY_TILES = MAX_QUERY_LEN * NUM_HEADS // QUERY_TILE_ROWS
"""Query tiles of a request at most; the decode scorer has a kernel for each number of them."""
ITEM_TOKENS = 64
"""Query tokens of one segment that a prefill work item scores."""
UNIT_BLOCKS = 4
"""Blocks per work unit. A prefill plan divides items into units."""
ITEM_UNITS = 2
"""Units that stand for the start of an item: it loads its queries and waits for its first keys."""
MAX_SEGMENTS = 65536
"""Maximum segments per prefill window."""
MAX_ITEMS = 65535
"""Maximum work items per prefill window."""
MAX_ITEM_BLOCKS = 65535
"""Maximum block columns per work item."""
POOL_LISTS = 128
"""Lists of the 16 best keys that a row of the fused decode chain's pool has room for. The last counts the others."""
POOL_ENTRY_BYTES = 8
"""Bytes of one key in a list of a pool."""
POOL_ROW_BYTES = POOL_LISTS * TOP_K * POOL_ENTRY_BYTES
"""Bytes of a row in the fused decode chain's pool."""
ITEM_LIST_BYTES = ITEM_TOKENS * NUM_HEADS * TOP_K * POOL_ENTRY_BYTES
"""Bytes of one work item's lists in the fused prefill chain's pool."""
PLAN_WORKSPACE_BYTES = 32 << 20
"""Scratch of the prefill planner."""
MAX_FORCED_BLOCKS = TOP_K
"""Maximum forced blocks of a selection, first and last together."""


@dataclass(frozen=True)
class ElementType:
    """Storage type of index queries and keys."""

    name: str
    bytes: int


E4M3 = ElementType("e4m3", 1)


@dataclass(frozen=True)
class Layout:
    """How the ranks of a tensor-parallel group share the keys of one page.

    With ``interleaved``, the ranks take the rows of a page one by one: local row ``i`` of page column ``c`` is global
    key ``page_size * c + world_size * i + rank``. Otherwise, each rank holds a contiguous run of rows: local row ``i``
    is global key ``page_size * c + rows * rank + i``.
    """

    page_size: int
    world_size: int
    interleaved: bool
    element: ElementType = field(default=E4M3)

    @property
    def name(self) -> str:
        """Key of the layout in file names and manifests, such as ``p128_tp2``."""
        return f"p{self.page_size}_tp{self.world_size}"

    @property
    def title(self) -> str:
        """Name of the layout in tables, such as ``P128-TP2``."""
        return f"P{self.page_size}-TP{self.world_size}"

    @property
    def rows(self) -> int:
        """Key rows of a page that one rank holds."""
        return self.page_size // self.world_size

    @property
    def page_bytes(self) -> int:
        """Bytes of a dense local page."""
        return self.rows * HEAD_DIM * self.element.bytes

    @property
    def heads_per_rank(self) -> int:
        """Index heads whose selection a rank owns."""
        return NUM_HEADS // self.world_size

    @property
    def row_stride(self) -> int:
        """Global keys from one local row to the next."""
        return self.world_size if self.interleaved else 1

    @property
    def rank_stride(self) -> int:
        """Global keys from a rank's first row of a page to the next rank's."""
        return 1 if self.interleaved else self.rows

    @property
    def index_scale(self) -> int:
        """Global blocks per local score column."""
        return self.page_size // BLOCK_TOKENS

    def index_offset(self, rank: int) -> int:
        """Global block of ``rank``'s score column 0."""
        return rank * self.index_scale // self.world_size

    def global_key(self, rank: int, column: int, row: int) -> int:
        """Global key index of local ``row`` of page ``column`` on ``rank``."""
        return self.page_size * column + self.rank_stride * rank + self.row_stride * row

    def owner(self, head: int) -> int:
        """Rank that merges ``head``."""
        return head // self.heads_per_rank


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(page_size=128, world_size=2, interleaved=True),
        Layout(page_size=128, world_size=4, interleaved=True),
        Layout(page_size=256, world_size=2, interleaved=False),
        Layout(page_size=256, world_size=4, interleaved=False),
    )
}
"""Every layout that has kernels, by name."""

PAGE_SIZES = tuple(sorted({layout.page_size for layout in LAYOUTS.values()}))
WORLD_SIZES = tuple(sorted({layout.world_size for layout in LAYOUTS.values()}))


def find_layout(page_size: int, world_size: int) -> Layout:
    """Return the layout of a page size and world size. Raise ``ValueError`` if there is none."""
    layout = LAYOUTS.get(f"p{page_size}_tp{world_size}")
    if layout is None:
        raise ValueError(
            f"page_size and world_size must be one of {[(x.page_size, x.world_size) for x in LAYOUTS.values()]}, "
            f"were ({page_size}, {world_size})"
        )
    return layout
