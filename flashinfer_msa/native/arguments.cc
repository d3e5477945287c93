// SPDX-License-Identifier: Apache-2.0
// Arguments that several operations share.
#include "arguments.h"

#include <string.h>

namespace msa_icp {

bool take_launch(Call& call) {
  if (call.at_tensor()) {
    auto* record = call.host_struct<LaunchRecord>("record");
    if (record == nullptr) return false;
    memset(record, 0, sizeof(*record));
    call.record_into(record);
    call.require_cuda();
    return true;
  }
  const bool launches = call.flag("launch");
  if (launches) call.require_cuda();
  return launches;
}

void check_rank(Call& call, int64_t rank, int world_size) { call.expect_between("rank", rank, 0, world_size - 1); }

void check_keys(Call& call, const Tensor& keys, const Tensor& table, const LayoutInfo& layout, int64_t batch,
                int64_t pages) {
  call.expect_shape(keys, "[pages, page_size / world_size, head dim", kAny, layout.rows, kHeadDim);
  call.expect_unit_last_stride(keys);
  if (call.ok() && keys.size(0) > 0 && keys.stride(1) != kHeadDim) {
    call.fail("%s must have dense rows (stride %d in dimension 1), had stride %lld", keys.name, kHeadDim,
              static_cast<long long>(keys.stride(1)));
  }
  call.expect_stride(keys, 0, layout.page_bytes, "pages must not overlap");
  call.expect_multiple(keys, 0, 16);
  call.expect_aligned(keys, 16);
  call.expect_shape(table, "[batch, pages of a request", batch, kAny);
  if (pages > 0) call.expect_size(table, 1, pages, INT64_MAX, "the pages that the plan's columns need");
  call.expect_unit_last_stride(table);
  call.expect_stride(table, 0, call.ok() ? table.size(1) : 0, "rows must not overlap");
}

void check_plane(Call& call, const Tensor& scores) {
  call.expect_unit_last_stride(scores);
  if (!call.ok()) return;
  call.expect_stride(scores, 1, scores.size(2), "rows must not overlap");
  call.expect_stride(scores, 0, kHeads * (scores.size(1) > 1 ? scores.stride(1) : scores.size(2)),
                     "tokens must not overlap");
}

void check_pool(Call& call, const Tensor& pool, int64_t bytes, const char* why) {
  call.expect_contiguous(pool);
  call.expect_aligned(pool, 16);
  call.expect_size(pool, 0, bytes, INT64_MAX, why);
  if (call.ok() && pool.size(0) % 8 != 0) {
    call.fail("%s must have a multiple of 8 bytes, had %lld", pool.name, static_cast<long long>(pool.size(0)));
  }
}

void check_selection(Call& call, const Selection& s, int64_t tokens) {
  if (!call.ok()) return;
  if (s.force_begin_blocks + s.force_end_blocks > kTopK) {
    call.fail("force_begin_blocks + force_end_blocks must be at most %d, was %d + %d", kTopK, s.force_begin_blocks,
              s.force_end_blocks);
  }
  if (s.index_offset >= s.index_scale) {
    call.fail("index_offset must be below index_scale = %d, was %d", s.index_scale, s.index_offset);
  }
  call.expect_shape(s.num_valid_pages, "[tokens", tokens);
  call.expect_size(s.num_valid_pages, 0, 0, kMaxTokens, "query tokens");
  call.expect_contiguous(s.num_valid_pages);
}

void check_selected_plane(Call& call, const Tensor& scores) {
  call.expect_shape(scores, "[tokens, heads, columns", kAny, kHeads, kAny);
  call.expect_size(scores, 2, 1, kMaxScoreColumns - 1, "score columns");
  check_plane(call, scores);
}

SelectParams select_params(const Selection& s, int64_t tokens) {
  SelectParams p = {};
  p.scores = s.scores.data<float>();
  p.num_valid_pages = s.num_valid_pages.data<int>();
  p.score_token_stride = s.scores.stride(0);
  p.score_head_stride = s.scores.stride(1);
  p.tokens = as_int(tokens);
  p.score_columns = as_int(s.scores.size(2));
  p.index_scale = s.index_scale;
  p.index_offset = s.index_offset;
  p.force_begin_blocks = s.force_begin_blocks;
  p.force_end_blocks = s.force_end_blocks;
  return p;
}

}  // namespace msa_icp
