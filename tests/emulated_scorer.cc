// SPDX-License-Identifier: Apache-2.0
// A portable prefill scorer on the CPU, in one CTA: `launch` runs a kernel of the rendered source "scorer.cu".
#include "emulated_cta.h"
#include "scorer.cu"

using Params = msa_icp::PrefillScoreParams;

static void (*chosen)(const Params);
static Params params;

// tensors: query, keys, block_table, qo_segment_lens, kv_segment_lens, qo_segment_offsets, qo_offset, work_range,
// work_info, scores. strides: page_pitch, table_stride, score_token_stride, score_head_stride. counts: max_items,
// max_blocks, tokens, rank, and the CTA's threads.
extern "C" void launch(void (*kernel)(const Params), void* const* tensors, const long long* strides,
                       const int* counts) {
  params = {};
  params.query = static_cast<const unsigned char*>(tensors[0]);
  params.keys = static_cast<const unsigned char*>(tensors[1]);
  params.block_table = static_cast<const int*>(tensors[2]);
  params.qo_segment_lens = static_cast<const int*>(tensors[3]);
  params.kv_segment_lens = static_cast<const int*>(tensors[4]);
  params.qo_segment_offsets = static_cast<const int*>(tensors[5]);
  params.qo_offset = static_cast<const int*>(tensors[6]);
  params.work_range = static_cast<const long long*>(tensors[7]);
  params.work_info = static_cast<const long long*>(tensors[8]);
  params.scores = static_cast<float*>(tensors[9]);
  params.page_pitch = strides[0];
  params.table_stride = strides[1];
  params.score_token_stride = strides[2];
  params.score_head_stride = strides[3];
  params.max_items = counts[0];
  params.max_blocks = counts[1];
  params.tokens = counts[2];
  params.rank = counts[3];
  chosen = kernel;
  emulation::run([] { chosen(params); }, counts[4]);
}
