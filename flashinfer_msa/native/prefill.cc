// SPDX-License-Identifier: Apache-2.0
// The prefill operations of flashinfer_msa.msa_ops: argument checks, kernel parameters, launches. Each takes `launch`
// first, then its arguments in the order in which the code takes them.
#include <tvm/ffi/c_api.h>

#include "arguments.h"

namespace msa_icp {
namespace {

constexpr int64_t kWorkspaceBytes = 32 << 20;
constexpr int64_t kItemListBytes = int64_t{kItemTokens} * kHeads * kTopK * sizeof(unsigned long long);

int64_t ceil_div(int64_t value, int64_t divisor) { return value / divisor + (value % divisor != 0); }

// ---- the plan of a window

struct Plan {
  Tensor qo_segment_lens, kv_segment_lens, qo_segment_offsets, kv_segment_offsets, qo_offset;
  Tensor work_range, work_info, workspace;
  int64_t batch, total_q, columns, max_items;
};

// Names of a plan's parts, as arguments of their own and as fields of a plan.
struct PlanNames {
  const char *qo_segment_lens, *kv_segment_lens, *qo_segment_offsets, *kv_segment_offsets, *qo_offset;
  const char *work_range, *work_info, *workspace, *num_qo_heads, *total_q, *max_query_len, *columns;
};
constexpr PlanNames kArguments = {"qo_segment_lens", "kv_segment_lens",   "qo_segment_offsets", "kv_segment_offsets",
                                  "qo_offset",       "packed_work_range", "packed_work_info",   "workspace",
                                  "num_qo_heads",    "total_q",           "max_query_len",      "columns"};
constexpr PlanNames kFields = {
    "plan.qo_segment_lens", "plan.kv_segment_lens",   "plan.qo_segment_offsets", "plan.kv_segment_offsets",
    "plan.qo_offset",       "plan.packed_work_range", "plan.packed_work_info",   "plan.workspace",
    "plan.num_qo_heads",    "plan.total_q",           "plan.max_query_len",      "plan.columns"};
constexpr PlanNames kWindowFields = {"window_plan.qo_segment_lens",    "window_plan.kv_segment_lens",
                                     "window_plan.qo_segment_offsets", "window_plan.kv_segment_offsets",
                                     "window_plan.qo_offset",          "window_plan.packed_work_range",
                                     "window_plan.packed_work_info",   "window_plan.workspace",
                                     "window_plan.num_qo_heads",       "window_plan.total_q",
                                     "window_plan.max_query_len",      "window_plan.columns"};

// Takes the tensors and limits that make a plan, but for its columns.
void take_plan(Call& call, Plan* plan, const PlanNames& names) {
  plan->qo_segment_lens = call.tensor(names.qo_segment_lens, Type::kInt32, 1);
  plan->kv_segment_lens = call.tensor(names.kv_segment_lens, Type::kInt32, 1);
  plan->qo_segment_offsets = call.tensor(names.qo_segment_offsets, Type::kInt32, 1);
  plan->kv_segment_offsets = call.tensor(names.kv_segment_offsets, Type::kInt32, 1);
  plan->qo_offset = call.tensor(names.qo_offset, Type::kInt32, 1);
  plan->work_range = call.tensor(names.work_range, Type::kInt64, 1);
  plan->work_info = call.tensor(names.work_info, Type::kInt64, 1);
  plan->workspace = call.tensor(names.workspace, Type::kUInt8, 1);
  call.integer(names.num_qo_heads, kHeads, kHeads);
  plan->total_q = call.integer(names.total_q, 1, kMaxTokens);
  call.integer(names.max_query_len, 1, plan->total_q);
}

void check_plan(Call& call, Plan* plan, int64_t multiprocessors, const PlanNames& names, bool is_new) {
  if (!call.ok()) return;
  const int64_t batch = plan->batch = plan->qo_segment_lens.size(0);
  if (batch > kMaxSegments) {
    call.fail("%s must have at most %d segments, had %lld", names.qo_segment_lens, kMaxSegments,
              static_cast<long long>(batch));
  }
  const Tensor* of_batch[] = {&plan->qo_segment_lens, &plan->kv_segment_lens, &plan->qo_offset};
  for (const Tensor* t : of_batch) {
    call.expect_shape(*t, "[batch", batch);
    call.expect_contiguous(*t);
  }
  const Tensor* offsets[] = {&plan->qo_segment_offsets, &plan->kv_segment_offsets};
  for (const Tensor* t : offsets) {
    call.expect_shape(*t, "[batch + 1", batch + 1);
    call.expect_contiguous(*t);
  }
  // Empty segments have no item.
  const int64_t segments = batch < plan->total_q ? batch : plan->total_q;
  plan->max_items = batch == 0 ? 0 : ceil_div(plan->total_q, kItemTokens) + segments - 1;
  // A plan that exists has no more than it may have, whatever its bounds would allow.
  if (!is_new && plan->max_items > kMaxItems) plan->max_items = kMaxItems;
  if (call.ok() && plan->max_items > kMaxItems) {
    call.fail("%s must make at most %d items of %d tokens in %lld segments, was %lld", names.total_q, kMaxItems,
              kItemTokens, static_cast<long long>(batch), static_cast<long long>(plan->total_q));
  }
  call.expect_shape(plan->work_range, "[multiprocessors", multiprocessors);
  call.expect_contiguous(plan->work_range);
  call.expect_size(plan->work_info, 0, plan->max_items, INT64_MAX, "the items that the limits allow");
  call.expect_contiguous(plan->work_info);
  call.expect_size(plan->workspace, 0, kWorkspaceBytes, INT64_MAX, "workspace bytes");
  call.expect_contiguous(plan->workspace);
  call.expect_aligned(plan->workspace, 16);
}

// ---- scorer

// A prefill scorer's arguments. It writes `scores`, or the lists of the fused chain into `pool`.
struct Score {
  Tensor q, scores, pool;
  Keys k;
  Plan plan;
  int rank, world_size;
  bool initialize, compact, exact, enable_pdl;
  const LayoutInfo* info;
  int layout;
  int64_t columns;  // of a score row
  const PlanNames* names;
};

// Takes everything of a scorer up to its rank and world size.
void take_score(Call& call, Score* s, const char* q_name, const char* k_name, const char* world_size_name,
                int64_t* multiprocessors) {
  s->q = call.tensor(q_name, Type::kE4M3, 3);
  s->k = take_keys(call, k_name);
  take_plan(call, &s->plan, *s->names);
  s->plan.columns = call.integer(s->names->columns, 1, kMaxItemBlocks);
  *multiprocessors = call.integer("multiprocessors", 1, INT32_MAX);
  take_rank(call, &s->rank, &s->world_size, world_size_name);
}

void check_score(Call& call, Score* s, int64_t multiprocessors) {
  check_plan(call, &s->plan, multiprocessors, *s->names, false);
  if (!call.ok()) return;
  const int64_t rows = s->k.keys.size(1), page_size = rows <= 256 ? rows * s->world_size : 0;
  s->layout = find_layout(as_int(page_size), s->world_size);
  if (s->layout == 0) {
    call.fail("%s must have 128 / %d or 256 / %d rows a page, had shape [%lld, %lld, %lld]", s->k.keys.name,
              s->world_size, s->world_size, static_cast<long long>(s->k.keys.size(0)), static_cast<long long>(rows),
              static_cast<long long>(s->k.keys.size(2)));
    return;
  }
  s->info = &layout_info(s->layout);
  const int64_t pages = ceil_div(s->plan.columns, s->info->index_scale);
  call.expect_shape(s->q, "[total_q, heads, head dim", s->plan.total_q, kHeads, kHeadDim);
  call.expect_contiguous(s->q);
  call.expect_aligned(s->q, 16);
  check_keys(call, s->k, *s->info, s->plan.batch, pages);
  call.expect_size(s->k.keys, 0, 1, INT32_MAX, "pages");
  s->columns = s->compact ? pages : s->plan.columns;
}

void refuse_compact_blocks(Call& call, const Score& s) {
  if (call.ok() && s.compact && s.info->index_scale == 1) {
    call.fail("compact must be False for 128-token pages (%d rows times tp %d), which are blocks, was True",
              s.info->rows, s.world_size);
  }
}

PrefillScoreParams score_params(Call& call, const Score& s, bool tensor_maps) {
  PrefillScoreParams p = {};
  p.query = s.q.data<unsigned char>();
  p.keys = s.k.keys.data<unsigned char>();
  p.block_table = s.k.block_table.data<int>();
  p.qo_segment_lens = s.plan.qo_segment_lens.data<int>();
  p.kv_segment_lens = s.plan.kv_segment_lens.data<int>();
  p.qo_segment_offsets = s.plan.qo_segment_offsets.data<int>();
  p.qo_offset = s.plan.qo_offset.data<int>();
  p.work_range = s.plan.work_range.data<long long>();
  p.work_info = s.plan.work_info.data<long long>();
  // A dimension of one element has any stride.
  p.page_pitch = s.k.keys.size(0) > 1 ? s.k.keys.stride(0) : s.info->page_bytes;
  p.table_stride = s.k.block_table.stride(0);
  if (s.scores) {
    p.scores = s.scores.data<float>();
    p.score_token_stride = s.scores.stride(0);
    p.score_head_stride = s.scores.stride(1);
    p.aligned_scores = reinterpret_cast<uintptr_t>(p.scores) % 16 == 0 && p.score_token_stride % 4 == 0 &&
                       p.score_head_stride % 4 == 0;
  }
  p.max_items = as_int(s.plan.max_items);
  p.max_blocks = as_int(s.plan.columns);
  p.tokens = as_int(s.plan.total_q);
  p.rank = s.rank;
  if (tensor_maps) set_tensor_maps(call, &p, s.info->rows, s.k.keys.size(0));
  return p;
}

Launch score_launch(const Score& s, PrefillScoreParams* params, const Device& device) {
  const int by_block = s.info->index_scale > 1 && !s.compact;
  const int role = s.scores ? kPrefillScore + 2 * s.exact + by_block : kPrefillLists + s.exact;
  return {s.layout, role, static_cast<unsigned>(device.multiprocessors), 1, params, s.enable_pdl};
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
  const int role = kSelectPrefill + wide;
  const int64_t rows = static_cast<int64_t>(params->select.tokens) * kHeads;
  const unsigned rows_per_cta = wide ? 1 : device.kernels[kCommon][role].threads / 32;
  return {kCommon, role, static_cast<unsigned>(ceil_div(rows, rows_per_cta ? rows_per_cta : 1)), 1, params, false};
}

// ---- the fused chain

// Checks everything of a fused chain but its carrier, after its scorer.
void check_fused(Call& call, const Score& s, const Selection& selection) {
  if (!call.ok()) return;
  // A piece for each item, and one more for each range that begins within an item.
  const int64_t pieces = s.plan.max_items == 0 ? 0 : s.plan.max_items + s.plan.work_range.size(0) - 1;
  check_pool(call, s.pool, pieces * kItemListBytes, "the plan's msa_icp_prefill_pool_bytes");
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
    fold.batch = as_int(s.plan.batch);
    fold.max_items = score.max_items;
    fold.max_blocks = score.max_blocks;
    fold.num_ranges = as_int(s.plan.work_range.size(0));
    fold.tokens = score.tokens;
    fold.index_scale = s.info->index_scale;
    fold.index_offset = s.rank * s.info->index_scale / s.world_size;
    fold.force_begin_blocks = score.force_begin_blocks;
    fold.force_end_blocks = score.force_end_blocks;
    const int64_t ctas = kFoldCtasPerItem * s.plan.max_items + ceil_div(s.plan.total_q, kFoldSweepTokens);
    chain[0] = score_launch(s, &score, device);
    chain[1] = {kCommon, kPrefillFold, static_cast<unsigned>(ctas), 1, &fold, s.enable_pdl};
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

// prefill_plan(launch, qo_segment_lens, kv_segment_lens, qo_segment_offsets, kv_segment_offsets, qo_offset,
//              packed_work_range, packed_work_info, workspace, num_qo_heads, total_q, max_query_len, max_seq_len,
//              multiprocessors)
MSA_EXPORT __tvm_ffi_prefill_plan(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  Plan plan;
  take_plan(call, &plan, kArguments);
  const int64_t max_seq_len = call.integer("max_seq_len", 1, int64_t{kMaxItemBlocks} * kBlockTokens);
  const int64_t multiprocessors = call.integer("multiprocessors", 1, INT32_MAX);
  check_plan(call, &plan, multiprocessors, kArguments, true);
  plan.columns = ceil_div(max_seq_len, kBlockTokens);
  if (call.ok() && plan.max_items * plan.columns > INT32_MAX) {
    call.fail("max_seq_len must make at most %d columns of %lld items, was %lld", INT32_MAX,
              static_cast<long long>(plan.max_items), static_cast<long long>(max_seq_len));
  }
  PrefillPlanParams params = {};
  return finish<1>(call, launches && call.ok() && plan.batch > 0, [&](Device&, Launch* chain) {
    params.qo_segment_lens = plan.qo_segment_lens.data<int>();
    params.kv_segment_lens = plan.kv_segment_lens.data<int>();
    params.qo_offset = plan.qo_offset.data<int>();
    params.work_range = plan.work_range.data<long long>();
    params.work_info = plan.work_info.data<long long>();
    params.first_item = plan.workspace.data<int>();
    params.end_unit = params.first_item + kMaxSegments;
    params.batch = as_int(plan.batch);
    params.max_items = as_int(plan.max_items);
    params.max_blocks = as_int(plan.columns);
    params.num_ranges = as_int(multiprocessors);
    chain[0] = {kCommon, kPrefillPlan, 1, 1, &params, false};
    return 1;
  });
}

// prefill_score(launch, q, k, block_table, <plan>, rank, tp, max_score, sm_scale, initialize, compact, enable_pdl,
// exact), where <plan> is as for prefill_plan with `columns` in place of max_seq_len.
MSA_EXPORT __tvm_ffi_prefill_score(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  Score s;
  s.names = &kFields;
  int64_t multiprocessors;
  take_score(call, &s, "q", "k", "tp", &multiprocessors);
  s.scores = call.tensor("max_score", Type::kFloat32, 3);
  call.finite_number("sm_scale");
  s.initialize = call.flag("initialize");
  s.compact = call.flag("compact");
  s.enable_pdl = call.flag("enable_pdl");
  s.exact = call.flag("exact");
  check_score(call, &s, multiprocessors);
  refuse_compact_blocks(call, s);
  call.expect_shape(s.scores, "[plan.total_q, heads, columns", s.plan.total_q, kHeads, kAny);
  call.expect_size(s.scores, 2, s.columns, INT32_MAX, "score columns");
  check_plane(call, s.scores);
  PrefillFillParams fill = {};
  PrefillScoreParams score;
  return finish<2>(call, launches && call.ok() && s.plan.batch > 0, [&](Device& device, Launch* chain) {
    int length = 0;
    if (s.initialize) {
      fill.scores = s.scores.data<float>();
      fill.score_token_stride = s.scores.stride(0);
      fill.score_head_stride = s.scores.stride(1);
      fill.score_columns = as_int(s.scores.size(2));
      chain[length++] = {kCommon, kPrefillFill, static_cast<unsigned>(s.plan.total_q * kHeads), 1, &fill, s.enable_pdl};
    }
    score = score_params(call, s, takes_tensor_maps(device));
    chain[length++] = score_launch(s, &score, device);
    return length;
  });
}

// select_prefill(launch, scores, num_valid_pages, carrier, force_begin_blocks, force_end_blocks, index_scale,
//                index_offset)
MSA_EXPORT __tvm_ffi_select_prefill(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  Selection s;
  s.scores = call.tensor("scores", Type::kFloat32, 3);
  s.num_valid_pages = call.tensor("num_valid_pages", Type::kInt32, 1);
  const Tensor carrier = call.tensor("carrier", Type::kInt32, 3);
  take_forced_blocks(call, &s);
  take_index_map(call, &s);
  check_selected_plane(call, s.scores);
  const int64_t tokens = call.ok() ? s.scores.size(0) : 0;
  check_selection(call, s, tokens);
  check_carrier(call, carrier, tokens);
  SelectPrefillParams params;
  return finish<1>(call, launches && tokens > 0, [&](Device& device, Launch* chain) {
    params = select_params(s, carrier, tokens, s.scores.size(2));
    chain[0] = select_launch(&params, device);
    return 1;
  });
}

// prefill_score_select(launch, q, k, block_table, <plan>, rank, tp, num_valid_pages, pool, carrier, compact,
//                      force_begin_blocks, force_end_blocks, enable_pdl, exact): the fused chain
MSA_EXPORT __tvm_ffi_prefill_score_select(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  Score s;
  s.names = &kFields;
  int64_t multiprocessors;
  take_score(call, &s, "q", "k", "tp", &multiprocessors);
  Selection selection;
  selection.num_valid_pages = call.tensor("num_valid_pages", Type::kInt32, 1);
  s.pool = call.tensor("pool", Type::kUInt8, 1);
  const Tensor carrier = call.tensor("carrier", Type::kInt32, 3);
  s.compact = call.flag("compact");
  take_forced_blocks(call, &selection);
  selection.index_scale = 1;  // the layout has the map
  selection.index_offset = 0;
  s.enable_pdl = call.flag("enable_pdl");
  s.exact = call.flag("exact");
  check_score(call, &s, multiprocessors);
  refuse_compact_blocks(call, s);
  if (call.ok() && !s.compact && s.info->index_scale > 1) {
    call.fail("compact must be True for 256-token pages (%d rows times tp %d), was False", s.info->rows, s.world_size);
  }
  check_fused(call, s, selection);
  check_carrier(call, carrier, s.plan.total_q);
  Fused fused;
  return finish<2>(call, launches && call.ok() && s.plan.batch > 0, [&](Device& device, Launch* chain) {
    return fused.launches(call, s, selection, carrier, device, chain);
  });
}

// prefill_local(launch, query, index_k, block_table, <plan>, rank, world_size, score_scratch, num_valid_pages,
//               carrier_view, force_begin_blocks, force_end_blocks, index_scale, index_offset, pool, short_scratch,
//               exact): the facade's scorer and selection, with a column a page; with a pool the fused chain, unless
// the window fits into the facade's own scratch for short ones. Everything is checked before the first launch.
MSA_EXPORT __tvm_ffi_prefill_local(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  Score s;
  s.names = &kWindowFields;
  int64_t multiprocessors;
  take_score(call, &s, "query", "index_k", "world_size", &multiprocessors);
  const Tensor scratch = call.optional_tensor("score_scratch", Type::kFloat32, 3);
  Selection selection;
  selection.num_valid_pages = call.tensor("num_valid_pages", Type::kInt32, 1);
  const Tensor carrier = call.tensor("carrier_view", Type::kInt32, 3);
  take_forced_blocks(call, &selection);
  take_index_map(call, &selection);
  s.pool = call.optional_tensor("pool", Type::kUInt8, 1);
  const Tensor short_scratch = call.optional_tensor("short_scratch", Type::kFloat32, 3);
  s.exact = call.flag("exact");
  if (call.ok() && !scratch && !s.pool) call.fail("score_scratch must be a dense tensor, was None");
  s.initialize = s.enable_pdl = false;
  s.compact = true;
  check_score(call, &s, multiprocessors);
  if (call.ok() && s.info->index_scale != selection.index_scale) {
    call.fail("index_k must have %d rows a page, had %d", kBlockTokens * selection.index_scale / s.world_size,
              s.info->rows);
  }
  if (s.pool) {
    check_fused(call, s, selection);
    const bool fits =
        call.ok() && short_scratch && s.plan.total_q <= short_scratch.size(0) && s.columns <= short_scratch.size(2);
    if (fits) s.scores = short_scratch;
  } else {
    s.scores = scratch;
    if (call.ok() && s.columns >= kMaxScoreColumns) {
      call.fail("window_plan.columns must make fewer than %d score columns, was %lld", kMaxScoreColumns,
                static_cast<long long>(s.plan.columns));
    }
    call.expect_shape(s.scores, "[at least window_plan.total_q, heads, columns", kAny, kHeads, kAny);
    call.expect_size(s.scores, 0, s.plan.total_q, INT64_MAX, "query tokens");
    call.expect_size(s.scores, 2, s.columns, INT32_MAX, "score columns");
    check_plane(call, s.scores);
    check_selection(call, selection, s.plan.total_q);
  }
  check_carrier(call, carrier, s.plan.total_q);
  selection.scores = s.scores;
  Fused fused;
  PrefillScoreParams score;
  SelectPrefillParams select;
  return finish<2>(
      call, launches && call.ok() && s.plan.batch > 0,
      [&](Device& device, Launch* chain) {
        if (!s.scores) return fused.launches(call, s, selection, carrier, device, chain);
        score = score_params(call, s, takes_tensor_maps(device));
        select = select_params(selection, carrier, s.plan.total_q, s.columns);
        chain[0] = score_launch(s, &score, device);
        chain[1] = select_launch(&select, device);
        return 2;
      },
      &s.k.keys);
}

}  // namespace msa_icp
