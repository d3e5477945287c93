// SPDX-License-Identifier: Apache-2.0
// The prefill operations of flashinfer_msa.msa_ops: argument checks, kernel parameters, launches. Each takes `launch`,
// then the fields of its call (calls.h).
#include <tvm/ffi/c_api.h>

#include "arguments.h"
#include "calls.h"

namespace msa_icp {
namespace {

int64_t ceil_div(int64_t value, int64_t divisor) { return value / divisor + (value % divisor != 0); }

// ---- the plan of a window

// How large a plan is: its segments, and the items that its limits allow.
struct PlanSize {
  int64_t batch, max_items;
};

// Checks a plan, or the planner's call that makes a new one. `owner` is what errors put before names of its fields.
template <typename P>
PlanSize check_plan(Call& call, const P& plan, int multiprocessors, const char* owner, bool is_new) {
  if (!call.ok()) return {};
  const int64_t batch = plan.qo_segment_lens.size(0);
  if (batch > kMaxSegments) {
    call.fail("%s must have at most %d segments, had %lld", plan.qo_segment_lens.name, kMaxSegments,
              static_cast<long long>(batch));
  }
  const Tensor* of_batch[] = {&plan.qo_segment_lens, &plan.kv_segment_lens, &plan.qo_offset};
  for (const Tensor* t : of_batch) {
    call.expect_shape(*t, "[batch", batch);
    call.expect_contiguous(*t);
  }
  const Tensor* offsets[] = {&plan.qo_segment_offsets, &plan.kv_segment_offsets};
  for (const Tensor* t : offsets) {
    call.expect_shape(*t, "[batch + 1", batch + 1);
    call.expect_contiguous(*t);
  }
  // Empty segments have no item.
  const int64_t segments = batch < plan.total_q ? batch : plan.total_q;
  int64_t max_items = batch == 0 ? 0 : ceil_div(plan.total_q, kItemTokens) + segments - 1;
  // A plan that exists has no more than it may have, whatever its bounds would allow.
  if (!is_new && max_items > kMaxItems) max_items = kMaxItems;
  if (call.ok() && max_items > kMaxItems) {
    call.fail("%stotal_q must make at most %d items of %d tokens in %lld segments, was %d", owner, kMaxItems,
              kItemTokens, static_cast<long long>(batch), plan.total_q);
  }
  call.expect_shape(plan.packed_work_range, "[multiprocessors", multiprocessors);
  call.expect_contiguous(plan.packed_work_range);
  call.expect_size(plan.packed_work_info, 0, max_items, INT64_MAX, "the items that the limits allow");
  call.expect_contiguous(plan.packed_work_info);
  call.expect_size(plan.workspace, 0, kPlanWorkspaceBytes, INT64_MAX, "workspace bytes");
  call.expect_contiguous(plan.workspace);
  call.expect_aligned(plan.workspace, 16);
  return {batch, max_items};
}

// ---- scorer

// A prefill scorer's arguments. It writes `scores`, or the lists of the fused chain into `pool`.
struct Score {
  Tensor q, k, block_table, scores, pool;
  calls::PlanArguments plan;
  PlanSize size;
  int rank, world_size;
  bool compact, exact, enable_pdl;
  const LayoutInfo* info;
  int layout;
  int64_t columns;  // of a score row
};

// Checks everything of a scorer but what it writes. `owner` is what errors put before names of its plan's fields.
template <typename C>
Score make_score(Call& call, const C& c, const Tensor& q, const Tensor& k, const calls::PlanArguments& plan,
                 int world_size, bool compact, const char* owner) {
  Score s = {};
  s.q = q;
  s.k = k;
  s.block_table = c.block_table;
  s.plan = plan;
  s.rank = as_int(c.rank);
  s.world_size = world_size;
  s.compact = compact;
  s.exact = c.exact;
  check_rank(call, c.rank, world_size);
  s.size = check_plan(call, plan, plan.multiprocessors, owner, false);
  if (!call.ok()) return s;
  const int64_t rows = k.size(1), page_size = rows <= 256 ? rows * world_size : 0;
  s.layout = find_layout(as_int(page_size), world_size);
  if (s.layout == 0) {
    call.fail("%s must have 128 / %d or 256 / %d rows a page, had shape [%lld, %lld, %lld]", k.name, world_size,
              world_size, static_cast<long long>(k.size(0)), static_cast<long long>(rows),
              static_cast<long long>(k.size(2)));
    return s;
  }
  s.info = &layout_info(s.layout);
  const int64_t pages = ceil_div(plan.columns, s.info->index_scale);
  call.expect_shape(q, "[total_q, heads, head dim", plan.total_q, kHeads, kHeadDim);
  call.expect_contiguous(q);
  call.expect_aligned(q, 16);
  check_keys(call, k, s.block_table, *s.info, s.size.batch, pages);
  call.expect_size(k, 0, 1, INT32_MAX, "pages");
  s.columns = compact ? pages : plan.columns;
  return s;
}

// The scorer of an operation of its own, which may write a column per block.
template <typename C>
Score make_own_score(Call& call, const C& c) {
  Score s = make_score(call, c, c.q, c.k, c.plan, c.tp, c.compact, "plan.");
  s.enable_pdl = c.enable_pdl;
  if (call.ok() && s.compact && s.info->index_scale == 1) {
    call.fail("compact must be False for 128-token pages (%d rows times tp %d), which are blocks, was True",
              s.info->rows, s.world_size);
  }
  return s;
}

PrefillScoreParams score_params(Call& call, const Score& s, bool tensor_maps) {
  PrefillScoreParams p = {};
  p.query = s.q.data<unsigned char>();
  p.keys = s.k.data<unsigned char>();
  p.block_table = s.block_table.data<int>();
  p.qo_segment_lens = s.plan.qo_segment_lens.data<int>();
  p.kv_segment_lens = s.plan.kv_segment_lens.data<int>();
  p.qo_segment_offsets = s.plan.qo_segment_offsets.data<int>();
  p.qo_offset = s.plan.qo_offset.data<int>();
  p.work_range = s.plan.packed_work_range.data<long long>();
  p.work_info = s.plan.packed_work_info.data<long long>();
  // A dimension of one element has any stride.
  p.page_pitch = s.k.size(0) > 1 ? s.k.stride(0) : s.info->page_bytes;
  p.table_stride = s.block_table.stride(0);
  if (s.scores) {
    p.scores = s.scores.data<float>();
    p.score_token_stride = s.scores.stride(0);
    p.score_head_stride = s.scores.stride(1);
    p.aligned_scores = reinterpret_cast<uintptr_t>(p.scores) % 16 == 0 && p.score_token_stride % 4 == 0 &&
                       p.score_head_stride % 4 == 0;
  }
  p.max_items = as_int(s.size.max_items);
  p.max_blocks = s.plan.columns;
  p.tokens = s.plan.total_q;
  p.rank = s.rank;
  if (tensor_maps) set_tensor_maps(call, &p, s.info->rows, s.k.size(0));
  return p;
}

Launch score_launch(const Score& s, PrefillScoreParams* params, const Device& device) {
  const bool by_block = s.info->index_scale > 1 && !s.compact;
  const Role role = s.scores ? kPrefillScorers[s.exact][by_block] : kPrefillListers[s.exact];
  return {s.layout, role, static_cast<unsigned>(device.multiprocessors), 1, Params(params), s.enable_pdl};
}

// ---- selection

void check_carrier(Call& call, const Tensor& carrier, int64_t tokens) {
  call.expect_shape(carrier, "[heads, tokens, words", kHeads, tokens, kRowWords);
  call.expect_unit_last_stride(carrier);
  call.expect_stride(carrier, 1, kRowWords, "rows must not overlap");
  if (!call.ok()) return;
  call.expect_stride(carrier, 0, tokens * (tokens > 1 ? carrier.stride(1) : kRowWords), "heads must not overlap");
}

SelectPrefillParams select_params(const Selection& s, const Tensor& carrier, int64_t tokens, int64_t columns) {
  SelectPrefillParams p = {};
  p.select = select_params(s, tokens);
  p.select.score_columns = as_int(columns);
  p.carrier = carrier.data<int>();
  p.carrier_head_stride = carrier.stride(0);
  p.carrier_row_stride = carrier.stride(1);
  return p;
}

Launch select_launch(SelectPrefillParams* params, const Device& device) {
  const bool wide = params->select.score_columns > kNarrowColumns;
  const Role role = kPrefillSelectors[wide];
  const int64_t rows = static_cast<int64_t>(params->select.tokens) * kHeads;
  const unsigned rows_per_cta = wide ? 1 : device.kernels[kCommon][role].threads / 32;
  return {kCommon, role,           static_cast<unsigned>(ceil_div(rows, rows_per_cta ? rows_per_cta : 1)),
          1,       Params(params), false};
}

// ---- the fused chain

// Checks everything of a fused chain but its carrier, after its scorer.
void check_fused(Call& call, const Score& s, const Selection& selection) {
  if (!call.ok()) return;
  // Lists for each item, and more for each range that begins within an item.
  const int64_t lists = s.size.max_items == 0 ? 0 : s.size.max_items + s.plan.packed_work_range.size(0) - 1;
  check_pool(call, s.pool, lists * kItemListBytes, "the plan's msa_icp_prefill_pool_bytes");
  check_selection(call, selection, s.plan.total_q);
}

// The fused chain's two kernels.
struct Fused {
  PrefillScoreParams score;
  PrefillFoldParams fold;

  int launches(Call& call, const Score& s, const Selection& selection, const Tensor& carrier, const Device& device,
               Launch* chain) {
    score = score_params(call, s, takes_tensor_maps(device));
    score.num_valid_pages = selection.num_valid_pages.data<int>();
    score.pool = s.pool.data<unsigned long long>();
    score.force_begin_blocks = selection.force_begin_blocks;
    score.force_end_blocks = selection.force_end_blocks;
    fold = {};
    fold.pool = score.pool;
    fold.qo_segment_lens = score.qo_segment_lens;
    fold.qo_segment_offsets = score.qo_segment_offsets;
    fold.work_range = score.work_range;
    fold.work_info = score.work_info;
    fold.num_valid_pages = score.num_valid_pages;
    fold.carrier = carrier.data<int>();
    fold.carrier_head_stride = carrier.stride(0);
    fold.carrier_row_stride = carrier.stride(1);
    fold.batch = as_int(s.size.batch);
    fold.max_items = score.max_items;
    fold.max_blocks = score.max_blocks;
    fold.num_ranges = as_int(s.plan.packed_work_range.size(0));
    fold.tokens = score.tokens;
    fold.index_scale = s.info->index_scale;
    fold.index_offset = s.rank * s.info->index_scale / s.world_size;
    fold.force_begin_blocks = score.force_begin_blocks;
    fold.force_end_blocks = score.force_end_blocks;
    const int64_t ctas = kFoldCtasPerItem * s.size.max_items + ceil_div(s.plan.total_q, kFoldSweepTokens);
    chain[0] = score_launch(s, &score, device);
    chain[1] = {kCommon, kPrefillFold, static_cast<unsigned>(ctas), 1, Params(&fold), s.enable_pdl};
    return 2;
  }
};

}  // namespace

bool set_tensor_maps(Call& call, PrefillScoreParams* p, int rows, int64_t pages) {
  const uint64_t row_bytes = kHeadDim;
  const uint64_t query_sizes[] = {row_bytes, static_cast<uint64_t>(p->tokens) * kHeads}, query_strides[] = {row_bytes};
  const uint32_t query_box[] = {kHeadDim, kItemTokens * kHeads};
  const uint64_t key_sizes[] = {row_bytes, static_cast<uint64_t>(rows), static_cast<uint64_t>(pages)};
  const uint64_t key_strides[] = {row_bytes, static_cast<uint64_t>(p->page_pitch)};
  const uint32_t key_box[] = {kHeadDim, static_cast<uint32_t>(rows), 1};
  return make_tensor_map(call, &p->query_map, p->query, 2, query_sizes, query_strides, query_box) &&
         make_tensor_map(call, &p->key_map, p->keys, 3, key_sizes, key_strides, key_box);
}

// prefill_plan, which takes the multiprocessors of its device after its call: the planner.
MSA_EXPORT __tvm_ffi_prefill_plan(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  const auto c = calls::PrefillPlan::take(call);
  const int multiprocessors = as_int(call.integer("multiprocessors", 1, INT32_MAX));
  const PlanSize size = check_plan(call, c, multiprocessors, "", true);
  const int64_t columns = ceil_div(c.max_seq_len, kBlockTokens);
  if (call.ok() && size.max_items * columns > INT32_MAX) {
    call.fail("max_seq_len must make at most %d columns of %lld items, was %d", INT32_MAX,
              static_cast<long long>(size.max_items), c.max_seq_len);
  }
  PrefillPlanParams params = {};
  return finish<1>(call, launches && call.ok() && size.batch > 0, [&](Device&, Launch* chain) {
    params.qo_segment_lens = c.qo_segment_lens.data<int>();
    params.kv_segment_lens = c.kv_segment_lens.data<int>();
    params.qo_offset = c.qo_offset.data<int>();
    params.work_range = c.packed_work_range.data<long long>();
    params.work_info = c.packed_work_info.data<long long>();
    params.first_item = c.workspace.data<int>();
    params.end_unit = params.first_item + kMaxSegments;
    params.batch = as_int(size.batch);
    params.max_items = as_int(size.max_items);
    params.max_blocks = as_int(columns);
    params.num_ranges = multiprocessors;
    chain[0] = {kCommon, kPrefillPlan, 1, 1, Params(&params), false};
    return 1;
  });
}

// prefill_score: the prefill scorer, after a fill where rows are initialized.
MSA_EXPORT __tvm_ffi_prefill_score(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  const auto c = calls::PrefillScore::take(call);
  Score s = make_own_score(call, c);
  s.scores = c.max_score;
  call.expect_shape(s.scores, "[plan.total_q, heads, columns", s.plan.total_q, kHeads, kAny);
  call.expect_size(s.scores, 2, s.columns, INT32_MAX, "score columns");
  check_plane(call, s.scores);
  PrefillFillParams fill = {};
  PrefillScoreParams score;
  return finish<2>(call, launches && call.ok() && s.size.batch > 0, [&](Device& device, Launch* chain) {
    int length = 0;
    if (c.initialize) {
      fill.scores = s.scores.data<float>();
      fill.score_token_stride = s.scores.stride(0);
      fill.score_head_stride = s.scores.stride(1);
      fill.score_columns = as_int(s.scores.size(2));
      const unsigned rows = static_cast<unsigned>(s.plan.total_q * kHeads);
      chain[length++] = {kCommon, kPrefillFill, rows, 1, Params(&fill), s.enable_pdl};
    }
    score = score_params(call, s, takes_tensor_maps(device));
    chain[length++] = score_launch(s, &score, device);
    return length;
  });
}

// select_prefill: the prefill selection.
MSA_EXPORT __tvm_ffi_select_prefill(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  const auto c = calls::SelectPrefill::take(call);
  const Selection s = mapped_selection(c, c.scores);
  check_selected_plane(call, s.scores);
  const int64_t tokens = call.ok() ? s.scores.size(0) : 0;
  check_selection(call, s, tokens);
  check_carrier(call, c.carrier, tokens);
  SelectPrefillParams params;
  return finish<1>(call, launches && tokens > 0, [&](Device& device, Launch* chain) {
    params = select_params(s, c.carrier, tokens, s.scores.size(2));
    chain[0] = select_launch(&params, device);
    return 1;
  });
}

// prefill_score_select: the fused chain.
MSA_EXPORT __tvm_ffi_prefill_score_select(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  const auto c = calls::PrefillScoreSelect::take(call);
  Score s = make_own_score(call, c);
  s.pool = c.pool;
  const Selection selection = forced_selection(c);
  if (call.ok() && !s.compact && s.info->index_scale > 1) {
    call.fail("compact must be True for 256-token pages (%d rows times tp %d), was False", s.info->rows, s.world_size);
  }
  check_fused(call, s, selection);
  check_carrier(call, c.carrier, s.plan.total_q);
  Fused fused;
  return finish<2>(call, launches && call.ok() && s.size.batch > 0, [&](Device& device, Launch* chain) {
    return fused.launches(call, s, selection, c.carrier, device, chain);
  });
}

// prefill_local: the indexer's scorer and selection, with a column per page; with a pool the fused chain, unless the
// window fits into the indexer's own scratch for short ones. Everything is checked before the first launch.
MSA_EXPORT __tvm_ffi_prefill_local(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  const auto c = calls::PrefillLocal::take(call);
  if (!c.pool) call.expect_given(c.score_scratch);
  Score s = make_score(call, c, c.query, c.index_k, c.window_plan, c.world_size, true, "window_plan.");
  s.pool = c.pool;
  Selection selection = mapped_selection(c, c.score_scratch);
  if (call.ok() && s.info->index_scale != selection.index_scale) {
    call.fail("index_k must have %d rows a page, had %d", kBlockTokens * selection.index_scale / s.world_size,
              s.info->rows);
  }
  if (s.pool) {
    check_fused(call, s, selection);
    const Tensor& scratch = c.short_scratch;
    if (call.ok() && scratch && s.plan.total_q <= scratch.size(0) && s.columns <= scratch.size(2)) s.scores = scratch;
  } else {
    s.scores = c.score_scratch;
    if (call.ok() && s.columns >= kMaxScoreColumns) {
      call.fail("window_plan.columns must make fewer than %d score columns, was %d", kMaxScoreColumns, s.plan.columns);
    }
    call.expect_shape(s.scores, "[at least window_plan.total_q, heads, columns", kAny, kHeads, kAny);
    call.expect_size(s.scores, 0, s.plan.total_q, INT64_MAX, "query tokens");
    call.expect_size(s.scores, 2, s.columns, INT32_MAX, "score columns");
    check_plane(call, s.scores);
    check_selection(call, selection, s.plan.total_q);
  }
  check_carrier(call, c.carrier_view, s.plan.total_q);
  selection.scores = s.scores;
  Fused fused;
  PrefillScoreParams score;
  SelectPrefillParams select;
  return finish<2>(
      call, launches && call.ok() && s.size.batch > 0,
      [&](Device& device, Launch* chain) {
        if (!s.scores) return fused.launches(call, s, selection, c.carrier_view, device, chain);
        score = score_params(call, s, takes_tensor_maps(device));
        select = select_params(selection, c.carrier_view, s.plan.total_q, s.columns);
        chain[0] = score_launch(s, &score, device);
        chain[1] = select_launch(&select, device);
        return 2;
      },
      &s.k);
}

}  // namespace msa_icp
