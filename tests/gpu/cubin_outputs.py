# SPDX-License-Identifier: Apache-2.0
"""Prints digests of what every kernel writes for fixed inputs, and the compiler: ``cubin_outputs.py [--compile]``.

This is a separate program because a process loads the kernels of a GPU only once. ``--compile`` ignores the prebuilt
cubins. ``FLASHINFER_MSA_DRIVER`` selects one of the prebuilt sets.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch
from simulated_group import POISON, Group

from flashinfer_msa import msa_ops
from flashinfer_msa.layout import LAYOUTS, Layout
from flashinfer_msa.manifest import DATA, Manifest, load_manifest
from flashinfer_msa.prefill.accumulation import ACCUMULATIONS
from flashinfer_msa.runtime import loader
from flashinfer_msa.testing.problems import DecodeProblem, PrefillProblem, exchange, run_local_prefill

LENGTHS = [1, 127, 128, 129, 500, 1000, 4097, 20000]


def digest(*tensors: torch.Tensor) -> str:
    """Return the SHA-256 of the bytes of ``tensors``."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def decode(layout: Layout, query_len: int) -> dict[str, str]:
    """Return digests of the score planes, receive rows and Top16 of both chains, with both row kinds."""
    problem = DecodeProblem.random(
        layout, seq_lens=[length + query_len for length in LENGTHS], decode_query_len=query_len, device="cuda", seed=7
    )
    tokens = len(problem.index_q)
    found = {}
    for tagged in (False, True):
        for fused in (False, True):
            group = Group.make(layout, tokens=tokens, max_model_len=32768)
            planes, outputs = group.scores(tokens), group.outputs(tokens)
            options = {"slot": 1, "tagged": tagged}
            for rank, indexer in enumerate(group.indexers):
                pool = None
                if fused:
                    size = msa_ops.msa_icp_decode_pool_bytes(max_decode_tokens=tokens)
                    pool = torch.zeros(size, dtype=torch.uint8, device=indexer.device)
                scores = None if fused else planes[rank]
                group.publish(rank, problem, problem.shard(rank), scores, pool=pool, **options)
            rows = [digest(comm.tagged_recv if tagged else comm.recv) for comm in group.comms]
            for rank, output in enumerate(outputs):
                group.merge(rank, problem, output, **options)
            name = f"decode {layout.name} {query_len} {'tagged' if tagged else 'legacy'}{' fused' if fused else ''}"
            found[name] = digest(*planes, *outputs) + "".join(rows)
    return found


def prefill(layout: Layout, accumulation: str) -> dict[str, str]:
    """Return digests of the carriers and the merged Top16 of both chains."""
    problem = PrefillProblem.random(
        layout, query_lens=[100, 0, 1, 300], kv_lens=[150, 900, 1, 9000], positions=[50, 0, 0, 8000], device="cuda"
    )
    tokens = len(problem.index_q)
    group = Group.make(layout, tokens=8, max_model_len=32768, accumulation=accumulation)
    found = {}
    for fused in (False, True):
        carriers = []
        for indexer in group.indexers:
            scratch = torch.full(indexer.prefill_scratch_shape(), POISON, device="cuda")
            pool = torch.zeros(indexer.prefill_pool_shape(), dtype=torch.uint8, device="cuda") if fused else None
            carrier = torch.full(indexer.prefill_carrier_shape()[1:], -777, dtype=torch.int32, device="cuda")
            run_local_prefill(
                indexer, problem, problem.shard(indexer.rank), None if fused else scratch, carrier, tokens, pool
            )
            carriers.append(carrier[:, :tokens].clone())
        output = group.outputs(tokens)[0]
        group.indexers[0].prefill_merge(exchange(carriers, group.indexers[0]), problem.num_valid_pages, output)
        found[f"prefill {layout.name} {accumulation}{' fused' if fused else ''}"] = digest(*carriers, output)
    return found


def main() -> None:
    """Print a JSON object with the compiler's name and the digest of each case."""
    if "--compile" in sys.argv:
        nothing = Manifest(DATA, {**load_manifest().data, "cubins": []})
        loader.load_manifest = lambda: nothing
    index = torch.cuda.current_device()
    loader.load_device(index)
    found = {"compiler": loader.loaded_cubins(index).toolkit}
    for layout in LAYOUTS.values():
        for query_len in (1, 3, 5, 8):
            found |= decode(layout, query_len)
        for accumulation in ACCUMULATIONS:
            found |= prefill(layout, accumulation)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
