# SPDX-License-Identifier: Apache-2.0
"""The build matrix as data: all cubins, each with its template and its kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .. import layout as layouts
from ..abi import schema
from ..layout import LAYOUTS, Layout
from .tuning import DECODE_SCORE, PREFILL_SCORE, SELECT, PrefillScoreForm, SelectTuning


@dataclass(frozen=True)
class Architecture:
    """One GPU architecture that cubins are compiled for.

    ``toolkit`` is the oldest CUDA toolkit that knows it. ``bulk_copy`` is true if it has ``cp.async.bulk`` with
    transaction barriers, and ``dependent_launch`` if it has programmatic dependent launch; both exist since sm_90.
    ``wgmma`` is true if it has warpgroup products, which only sm_90a has. ``fp8_products`` is true if its tensor cores
    multiply e4m3 directly, by ``wgmma`` or by ``mma.sync``; on the others, compilers convert to FP16 and multiply that.

    ``cuda`` holds major versions of CUDA. The architecture has one set of cubins per version, made by a compiler of
    that version, because CUDA 12 drivers load no cubins of CUDA 13 compilers.
    """

    name: str
    capability: tuple[int, int]
    toolkit: tuple[int, int]
    shared_bytes: int
    bulk_copy: bool = True
    dependent_launch: bool = True
    wgmma: bool = False
    fp8_products: bool = False
    tested_on: str = ""
    cuda: tuple[int, ...] = (12,)


ARCHITECTURES: dict[str, Architecture] = {
    arch.name: arch
    for arch in (
        Architecture("sm_89", (8, 9), (12, 0), 99 * 1024, bulk_copy=False, dependent_launch=False, fp8_products=True),
        Architecture(
            "sm_90a", (9, 0), (12, 0), 227 * 1024, wgmma=True, fp8_products=True, tested_on="H200", cuda=(12, 13)
        ),
        Architecture("sm_100a", (10, 0), (12, 8), 227 * 1024),
        Architecture("sm_103a", (10, 3), (12, 9), 227 * 1024),
        # Its shared memory is assumed to be as large as sm_100a's.
        Architecture("sm_107a", (10, 7), (13, 4), 227 * 1024, cuda=(13,)),
        Architecture("sm_110a", (11, 0), (13, 0), 227 * 1024, cuda=(13,)),
        Architecture("sm_120a", (12, 0), (12, 8), 99 * 1024, fp8_products=True),
        Architecture("sm_121a", (12, 1), (12, 9), 99 * 1024, fp8_products=True),
    )
}


@dataclass(frozen=True)
class Kernel:
    """One entry point of a cubin: its launch shape, and the role by which the launcher finds it."""

    role: str
    symbol: str
    threads: int
    shared_bytes: int = 0


@dataclass(frozen=True)
class Unit:
    """One cubin: a template that is rendered for an architecture, and for a layout unless ``layout`` is None.

    ``job`` tells the cubins of one layout apart.
    """

    architecture: Architecture
    job: str
    layout: Layout | None
    template: str
    kernels: tuple[Kernel, ...]
    context: Mapping[str, Any]

    @property
    def name(self) -> str:
        """File name of the cubin in its folder, without the suffix."""
        return f"{self.job}_{self.layout.name}" if self.layout else self.job


SHARED = {
    **schema.CONSTANTS,
    "FAULT_FIELDS": schema.FAULT_FIELDS,
    "FAULT_WORDS": schema.FAULT_WORDS,
    "FAULT_WAITS": schema.FAULT_WAITS,
    "ROW_KINDS": schema.ROW_KINDS,
}
"""What every source and header is rendered from."""


GROUP_COLUMNS = 32
"""Score columns that a scorer writes together: 128 bytes, a cache line."""
KEY_TILE_ROWS = 128
"""Local key rows that the prefill scorer multiplies together."""
PLAN_THREADS = 1024
FILL_THREADS = 256
FOLD_THREADS = 256


def _decode_unit(arch: Architecture, layout: Layout) -> Unit:
    tuning = DECODE_SCORE[arch.name, layout.name]
    query_tiles = tuple(range(1, layouts.MAX_QUERY_TILES + 1))
    chunk_bytes = tuning.chunk_rows * layouts.HEAD_DIM * layout.element.bytes

    def shared_bytes(tiles: int, warps: int, stages: int) -> int:
        return warps * (stages * (chunk_bytes + 8) + tiles * 8 * (GROUP_COLUMNS + 1) * 4)

    def list_bytes(tiles: int, warps: int) -> int:
        return warps * tiles * 8 * layouts.TOP_K * 8

    shared = list(map(shared_bytes, query_tiles, tuning.warps, tuning.stages))
    list_shared = [
        shared_bytes(tiles, warps, stages) + list_bytes(tiles, warps)
        for tiles, warps, stages in zip(query_tiles, tuning.list_warps, tuning.list_stages, strict=True)
    ]
    return Unit(
        architecture=arch,
        job="decode_score",
        layout=layout,
        template="decode_score.cu.j2",
        kernels=tuple(
            Kernel(f"decode_{job}_{n}", f"msa_icp_decode_{job}_{layout.name}_n{n}", warps * 32, size)
            for job, all_warps, sizes in (("score", tuning.warps, shared), ("lists", tuning.list_warps, list_shared))
            for n, warps, size in zip(query_tiles, all_warps, sizes, strict=True)
        ),
        context={
            **SHARED,
            "GROUP_COLUMNS": GROUP_COLUMNS,
            "arch": arch,
            "layout": layout,
            "tuning": tuning,
            "query_tiles": query_tiles,
            "shared": shared,
            "list_shared": list_shared,
        },
    )


def _prefill_unit(arch: Architecture, layout: Layout) -> Unit:
    row_bytes = layouts.HEAD_DIM * layout.element.bytes
    item_rows = layouts.ITEM_TOKENS * layouts.NUM_HEADS
    tile_bytes = KEY_TILE_ROWS * row_bytes
    list_columns = PREFILL_SCORE[arch.name].list_columns
    group_bytes = item_rows * (list_columns + 4) * 4
    staging_bytes = item_rows // 8 * (8 * (GROUP_COLUMNS + 4) + 16) * 4

    def shared_bytes(form: PrefillScoreForm, *, lists: bool, exact: bool) -> int:
        # Each row has the 16 best scores, candidates of 6 bytes, and five numbers. With wgmma, each 16 rows have an
        # extra row.
        rows = item_rows // 16 * 17 if arch.wgmma else item_rows
        list_bytes = rows * (layouts.TOP_K * 4 + form.room * 6 + 5 * 4)
        if not arch.wgmma:
            return form.stages * tile_bytes + (group_bytes + list_bytes if lists else staging_bytes)
        # The queries of an item, two descriptions of 36 bytes, and the barriers: two per buffer, and one more.
        ring = item_rows * row_bytes + form.stages * tile_bytes + 72 + (1 + (1 + form.stages + 2) * 2) * 8
        half = 2 * 2 * tile_bytes if exact else 0
        out = group_bytes + list_bytes if lists else staging_bytes
        return -(-(ring + half + out) // 16) * 16

    # Scores with one column per page, scores with one column per block if a page has several blocks, and lists.
    outputs = {"score": "Pages", **({"score_global": "Blocks"} if layout.index_scale > 1 else {}), "lists": "Lists"}
    tuning = PREFILL_SCORE[arch.name]
    kernels, forms = [], []
    for exact in (False, True):
        for job, output in outputs.items():
            lists = job == "lists"
            form = tuning.form(lists=lists, exact=exact)
            role = f"prefill_{job}{'_exact' if exact else ''}"
            # If products are FP16 anyway, one kernel has both roles.
            symbol = f"msa_icp_{role if arch.fp8_products else 'prefill_' + job}_{layout.name}"
            size = shared_bytes(form, lists=lists, exact=exact)
            kernels.append(Kernel(role, symbol, form.threads, size))
            if arch.fp8_products or not exact:
                names = {"type": role.title().replace("_", "").removeprefix("Prefill") + "Form", "symbol": symbol}
                forms.append({**names, "output": output, "exact": exact, "shared_bytes": size, **asdict(form)})
    return Unit(
        architecture=arch,
        job="prefill_score",
        layout=layout,
        template=f"prefill_score_{'wgmma' if arch.wgmma else 'mma'}.cu.j2",
        kernels=tuple(kernels),
        context={
            **SHARED,
            "GROUP_COLUMNS": GROUP_COLUMNS,
            "KEY_TILE_ROWS": KEY_TILE_ROWS,
            "LIST_COLUMNS": list_columns,
            "arch": arch,
            "layout": layout,
            "threads": tuning.scores.threads,
            "forms": forms,
        },
    )


def _merge_threads(tuning: SelectTuning, world_size: int) -> dict[str, int]:
    """Return the threads of a merge CTA, by the source of its rows. In decode, one more warp only waits."""
    candidates = world_size * layouts.TOP_K
    decode = candidates * tuning.merge_share + 32
    return {"legacy": decode, "tagged": decode, "exchanged": candidates}


def _common_unit(arch: Architecture) -> Unit:
    tuning = SELECT[arch.name]
    return Unit(
        architecture=arch,
        job="common",
        layout=None,
        template="common.cu.j2",
        kernels=(
            *(
                Kernel(f"select_publish_{rows}_{width}", f"msa_icp_select_publish_{rows}_{width}", threads)
                for width, threads in (("narrow", tuning.narrow), ("wide", tuning.wide))
                for rows in schema.ROW_KINDS
            ),
            *(Kernel(f"fold_publish_{rows}", f"msa_icp_fold_publish_{rows}", 256) for rows in schema.ROW_KINDS),
            *(
                Kernel(f"merge_{source}_{world}", f"msa_icp_merge_{source}_{world}", threads)
                for world in layouts.WORLD_SIZES
                for source, threads in _merge_threads(tuning, world).items()
            ),
            Kernel("prefill_plan", "msa_icp_prefill_plan", PLAN_THREADS),
            Kernel("prefill_fill", "msa_icp_prefill_fill", FILL_THREADS),
            Kernel("prefill_fold", "msa_icp_prefill_fold", FOLD_THREADS),
            Kernel("select_prefill_narrow", "msa_icp_select_prefill_narrow", tuning.prefill_narrow),
            Kernel("select_prefill_wide", "msa_icp_select_prefill_wide", tuning.prefill_wide),
        ),
        context={
            **SHARED,
            "arch": arch,
            "world_sizes": layouts.WORLD_SIZES,
            "merge_threads": {world: _merge_threads(tuning, world) for world in layouts.WORLD_SIZES},
            "tuning": tuning,
            "PLAN_THREADS": PLAN_THREADS,
            "FILL_THREADS": FILL_THREADS,
            "FOLD_THREADS": FOLD_THREADS,
        },
    )


def units(architectures: Iterable[str] | None = None) -> list[Unit]:
    """Return all cubins of the named architectures (default: all of them), in a fixed order."""
    names = list(ARCHITECTURES) if architectures is None else list(architectures)
    unknown = [name for name in names if name not in ARCHITECTURES]
    if unknown:
        raise ValueError(f"architectures must be among {list(ARCHITECTURES)}, were {unknown}")
    return [
        unit
        for name in names
        for unit in (
            *(_decode_unit(ARCHITECTURES[name], layout) for layout in LAYOUTS.values()),
            *(_prefill_unit(ARCHITECTURES[name], layout) for layout in LAYOUTS.values()),
            _common_unit(ARCHITECTURES[name]),
        )
    ]
