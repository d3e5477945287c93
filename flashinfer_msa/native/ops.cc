// SPDX-License-Identifier: Apache-2.0
// The operations of flashinfer_msa.msa_ops: every argument check, the kernel parameters, the launches.
//
// Each takes `launch` first. Without it the call is only checked, on whatever device its tensors are: the torch backend
// checks its arguments here too. Arguments follow in the order in which the code takes them.
#include <tvm/ffi/c_api.h>

#include "call.h"
#include "constants.h"
#include "kernels.h"
#include "params.h"

#define MSA_EXPORT extern "C" __attribute__((visibility("default"))) int

namespace msa_icp {
namespace {

constexpr int64_t kAny = -1;
constexpr int64_t kMaxTokens = INT32_MAX / kHeads;  // a grid has a CTA for each of their rows
constexpr int64_t kMaxBatch = int64_t{65535} * kDecodeBatchTile;
constexpr int kRowsPerTile = 8;  // query rows of one tensor-core tile

int as_int(int64_t value) { return static_cast<int>(value); }

int take_one_of(Call& call, const char* name, int first, int second) {
  const int64_t value = call.integer(name, INT64_MIN, INT64_MAX);
  if (call.ok() && value != first && value != second) {
    call.fail("%s must be %d or %d, was %lld", name, first, second, static_cast<long long>(value));
  }
  return as_int(value);
}

// Takes `rank` and `world_size`.
void take_rank(Call& call, int* rank, int* world_size) {
  const int64_t value = call.integer("rank", INT64_MIN, INT64_MAX);
  *world_size = take_one_of(call, "world_size", 2, 4);
  if (call.ok() && (value < 0 || value >= *world_size)) {
    call.fail("rank must be in [0, %d], was %lld", *world_size - 1, static_cast<long long>(value));
  }
  *rank = as_int(value);
}

int take_heads_per_rank(Call& call, int world_size) {
  const int64_t heads = call.integer("heads_per_rank", INT64_MIN, INT64_MAX);
  if (call.ok() && heads != kHeads / world_size) {
    call.fail("heads_per_rank must be %d for world_size %d, was %lld", kHeads / world_size, world_size,
              static_cast<long long>(heads));
  }
  return as_int(heads);
}

// ---- decode scorer

struct Score {
  Tensor index_q, index_k, block_table, seq_lens, scores;
  int rank, world_size, page_size, query_len;
  bool enable_pdl;
};

void take_score_tensors(Call& call, Score* s, const char* scores_name) {
  s->index_q = call.tensor("index_q", Type::kE4M3, 3);
  s->index_k = call.tensor("index_k", Type::kE4M3, 3);
  s->block_table = call.tensor("block_table", Type::kInt32, 2);
  s->seq_lens = call.tensor("seq_lens", Type::kInt32, 1);
  s->scores = call.tensor(scores_name, Type::kFloat32, 3);
}

// Checks a decode scorer's arguments. Its score plane may hold more tokens than it is asked for with `larger_plane`.
int check_score(Call& call, const Score& s, bool larger_plane) {
  if (!call.ok()) return 0;
  const int layout = find_layout(s.page_size, s.world_size);
  if (layout == 0) {
    call.fail("page_size and world_size must be those of a supported layout, were %d and %d", s.page_size,
              s.world_size);
    return 0;
  }
  const LayoutInfo& info = layout_info(layout);
  const int64_t batch = s.seq_lens.size(0), tokens = batch * s.query_len;
  call.expect_contiguous(s.seq_lens);
  call.expect_size(s.seq_lens, 0, 0, kMaxBatch, "requests");
  call.expect_shape(s.index_q, "[batch * decode_query_len, heads, head dim", tokens, kHeads, kHeadDim);
  call.expect_contiguous(s.index_q);
  call.expect_aligned(s.index_q, 16);
  call.expect_shape(s.index_k, "[pages, page_size / world_size, head dim", kAny, info.rows, kHeadDim);
  call.expect_unit_last_stride(s.index_k);
  if (call.ok() && s.index_k.size(0) > 0 && s.index_k.stride(1) != kHeadDim) {
    call.fail("index_k must have dense rows (stride %d in dimension 1), had stride %lld", kHeadDim,
              static_cast<long long>(s.index_k.stride(1)));
  }
  call.expect_stride(s.index_k, 0, info.page_bytes, "pages must not overlap");
  call.expect_multiple(s.index_k, 0, 16);
  call.expect_aligned(s.index_k, 16);
  call.expect_shape(s.block_table, "[batch, pages of a request", batch, kAny);
  call.expect_unit_last_stride(s.block_table);
  call.expect_stride(s.block_table, 0, s.block_table ? s.block_table.size(1) : 0, "rows must not overlap");
  if (call.ok() && s.scores.size(2) % 4 != 0) {
    call.fail("%s must have a multiple of 4 columns, had %lld", s.scores.name,
              static_cast<long long>(s.scores.size(2)));
  }
  call.expect_size(s.scores, 2, 1, kMaxBlocks, "score columns");
  call.expect_shape(
      s.scores,
      larger_plane ? "[at least batch * decode_query_len, heads, columns" : "[batch * decode_query_len, heads, columns",
      larger_plane ? kAny : tokens, kHeads, kAny);
  if (larger_plane) call.expect_size(s.scores, 0, tokens, INT64_MAX, "query tokens");
  return layout;
}

// A score plane's rows: unit last stride, not overlapping.
void check_plane(Call& call, const Tensor& scores) {
  call.expect_unit_last_stride(scores);
  if (!call.ok()) return;
  call.expect_stride(scores, 1, scores.size(2), "rows must not overlap");
  call.expect_stride(scores, 0, kHeads * (scores.size(1) > 1 ? scores.stride(1) : scores.size(2)),
                     "tokens must not overlap");
}

DecodeScoreParams score_params(const Score& s) {
  DecodeScoreParams p = {};
  p.index_q = s.index_q.data<unsigned char>();
  p.index_k = s.index_k.data<unsigned char>();
  p.block_table = s.block_table.data<int>();
  p.seq_lens = s.seq_lens.data<int>();
  p.scores = s.scores.data<float>();
  p.page_pitch = s.index_k.stride(0);
  p.table_stride = s.block_table.stride(0);
  p.score_token_stride = s.scores.stride(0);
  p.score_head_stride = s.scores.stride(1);
  p.table_columns = as_int(s.block_table.size(1) < kMaxBlocks ? s.block_table.size(1) : kMaxBlocks);
  p.score_columns = as_int(s.scores.size(2));
  p.batch = as_int(s.seq_lens.size(0));
  p.query_len = s.query_len;
  p.rank = s.rank;
  p.vector_stores =
      reinterpret_cast<uintptr_t>(p.scores) % 16 == 0 && p.score_token_stride % 4 == 0 && p.score_head_stride % 4 == 0;
  return p;
}

Launch score_launch(const Score& s, int layout, DecodeScoreParams* params, const Device& device) {
  const int tiles = (s.query_len * kHeads + kRowsPerTile - 1) / kRowsPerTile;
  const unsigned batch_rows = (params->batch + kDecodeBatchTile - 1) / kDecodeBatchTile;
  return {layout,      kDecodeScore + tiles - 1, static_cast<unsigned>(device.multiprocessors), batch_rows, params,
          s.enable_pdl};
}

// ---- select and publish

struct Publish {
  Tensor scores, num_valid_pages, recv_bases, errors, generations;
  int slot, rank, world_size, heads_per_rank, capacity, force_begin_blocks, force_end_blocks, spin_limit;
  int index_scale, index_offset;
  const char* capacity_name = "capacity";
  bool enable_pdl;
};

void check_errors(Call& call, const Tensor& errors) {
  call.expect_contiguous(errors);
  call.expect_size(errors, 0, 1, INT64_MAX, "the error count");
}

void check_publish(Call& call, const Publish& p, int64_t tokens) {
  if (!call.ok()) return;
  if (p.force_begin_blocks + p.force_end_blocks > kTopK) {
    call.fail("force_begin_blocks + force_end_blocks must be at most %d, was %d + %d", kTopK, p.force_begin_blocks,
              p.force_end_blocks);
  }
  if (p.index_offset >= p.index_scale) {
    call.fail("index_offset must be below index_scale = %d, was %d", p.index_scale, p.index_offset);
  }
  if (tokens > p.capacity) {
    call.fail("%s must be at least the number of tokens, %lld, was %d", p.capacity_name, static_cast<long long>(tokens),
              p.capacity);
  }
  call.expect_shape(p.num_valid_pages, "[tokens", tokens);
  call.expect_size(p.num_valid_pages, 0, 0, kMaxTokens, "query tokens");
  call.expect_contiguous(p.num_valid_pages);
  call.expect_shape(p.recv_bases, "[world_size", p.world_size);
  call.expect_contiguous(p.recv_bases);
  check_errors(call, p.errors);
  call.expect_shape(p.generations, "[slot sets, heads, capacity", kSlotSets, kHeads, p.capacity);
  call.expect_contiguous(p.generations);
}

SelectPublishParams publish_params(const Publish& p, const Device& device) {
  SelectPublishParams out = {};
  out.scores = p.scores.data<float>();
  out.num_valid_pages = p.num_valid_pages.data<int>();
  out.recv_bases = p.recv_bases.data<long long>();
  out.generations = p.generations ? p.generations.data<int>() : nullptr;
  out.errors = p.errors.data<int>();
  out.fault = device.fault_on_device;
  out.score_token_stride = p.scores.stride(0);
  out.score_head_stride = p.scores.stride(1);
  out.score_columns = as_int(p.scores.size(2));
  out.index_scale = p.index_scale;
  out.index_offset = p.index_offset;
  out.force_begin_blocks = p.force_begin_blocks;
  out.force_end_blocks = p.force_end_blocks;
  out.rank = p.rank;
  out.world_size = p.world_size;
  out.heads_per_rank = p.heads_per_rank;
  out.capacity = p.capacity;
  out.slot = p.slot;
  out.spin_limit = p.spin_limit;
  return out;
}

Launch publish_launch(const Publish& p, int64_t tokens, SelectPublishParams* params) {
  const bool wide = p.scores.size(2) > kNarrowColumns, tagged = static_cast<bool>(p.generations);
  return {kCommon, kSelectPublish + 2 * wide + tagged, static_cast<unsigned>(tokens * kHeads), 1, params, p.enable_pdl};
}

// ---- merge

struct MergeCall {
  Tensor num_valid_pages, output, errors;
  int init_blocks, local_blocks, spin_limit, rank, slot;
  bool enable_pdl, tagged, exchanged;
  // The slot set: rows of [source, head, capacity], and the counters of [head, capacity].
  char* recv;
  int* expected;
  int64_t source_stride, head_stride, row_stride;
  int world_size, heads_per_rank, capacity;
};

void check_merge(Call& call, const MergeCall& m) {
  if (!call.ok()) return;
  const int64_t tokens = m.num_valid_pages.size(0);
  call.expect_contiguous(m.num_valid_pages);
  call.expect_size(m.num_valid_pages, 0, 0, kMaxTokens, "query tokens");
  if (tokens > m.capacity) {
    call.fail("num_valid_pages must have at most capacity = %d tokens, had %lld", m.capacity,
              static_cast<long long>(tokens));
  }
  call.expect_shape(m.output, "[tokens, heads_per_rank, 16", tokens, m.heads_per_rank, kTopK);
  call.expect_unit_last_stride(m.output);
  call.expect_disjoint_rows(m.output);
  check_errors(call, m.errors);
}

MergeParams merge_params(const MergeCall& m, const Device& device) {
  MergeParams p = {};
  p.recv = m.recv;
  p.num_valid_pages = m.num_valid_pages.data<int>();
  p.output = m.output.data<int>();
  p.expected_generations = m.expected;
  p.errors = m.errors.data<int>();
  p.fault = device.fault_on_device;
  p.recv_source_stride = m.source_stride;
  p.recv_head_stride = m.head_stride;
  p.recv_row_stride = m.row_stride;
  p.output_token_stride = m.output.stride(0);
  p.output_head_stride = m.output.stride(1);
  p.world_size = m.world_size;
  p.heads_per_rank = m.heads_per_rank;
  p.capacity = m.capacity;
  p.init_blocks = m.init_blocks;
  p.local_blocks = m.local_blocks;
  p.spin_limit = m.spin_limit;
  p.rank = m.rank;
  p.slot = m.slot;
  return p;
}

Launch merge_launch(const MergeCall& m, MergeParams* params) {
  const int role = kMerge + (m.world_size == 4 ? 3 : 0) + (m.exchanged ? 2 : m.tagged ? 1 : 0);
  return {kCommon, role, static_cast<unsigned>(m.num_valid_pages.size(0) * m.heads_per_rank), 1, params, m.enable_pdl};
}

// ---- the facade's decode chain: both halves take the plan's numbers from one list

struct Facade {
  Score score;
  Publish publish;
  MergeCall merge;
};

// Takes the numbers every decode half needs.
void take_plan(Call& call, Facade* f) {
  const int slot = as_int(call.integer("slot", 0, kSlotSets - 1));
  const bool enable_pdl = call.flag("enable_pdl");
  int rank, world_size;
  take_rank(call, &rank, &world_size);
  const int heads_per_rank = take_heads_per_rank(call, world_size);
  const int capacity = as_int(call.integer("capacity", 1, INT32_MAX));
  const int init_blocks = as_int(call.integer("init_blocks", 0, kTopK));
  const int local_blocks = as_int(call.integer("local_blocks", 0, kTopK));
  const int spin_limit = as_int(call.integer("spin_limit", 1, INT32_MAX));
  f->score.rank = f->publish.rank = f->merge.rank = rank;
  f->score.world_size = f->publish.world_size = f->merge.world_size = world_size;
  f->publish.heads_per_rank = f->merge.heads_per_rank = heads_per_rank;
  f->publish.capacity = f->merge.capacity = capacity;
  f->publish.capacity_name = "max_decode_tokens";
  f->publish.force_begin_blocks = f->merge.init_blocks = init_blocks;
  f->publish.force_end_blocks = f->merge.local_blocks = local_blocks;
  f->publish.spin_limit = f->merge.spin_limit = spin_limit;
  f->publish.slot = f->merge.slot = slot;
  f->score.enable_pdl = f->publish.enable_pdl = f->merge.enable_pdl = enable_pdl;
}

// Takes what the publishing half adds.
void take_publish_half(Call& call, Facade* f) {
  take_score_tensors(call, &f->score, "scores");
  f->publish.num_valid_pages = call.tensor("num_valid_pages", Type::kInt32, 1);
  f->publish.generations = call.optional_tensor("comm.publish_generations", Type::kInt32, 3);
  f->publish.recv_bases =
      call.tensor(f->publish.generations ? "comm.tagged_recv_bases" : "comm.recv_bases", Type::kInt64, 1);
  f->publish.errors = call.tensor("comm.errors", Type::kInt32, 1);
  f->score.page_size = as_int(call.integer("page_size", 1, INT32_MAX));
  const int max_query_len = as_int(call.integer("max_decode_query_len", 1, kMaxQueryLen));
  f->score.query_len = as_int(call.integer("decode_query_len", 1, max_query_len));
  f->publish.index_scale = as_int(call.integer("index_scale", 1, 2));
  f->publish.index_offset = as_int(call.integer("index_offset", 0, 1));
  f->publish.scores = f->score.scores;
}

// Takes what the merging half adds.
void take_merge_half(Call& call, Facade* f) {
  MergeCall& m = f->merge;
  m.num_valid_pages = call.tensor("num_valid_pages", Type::kInt32, 1);
  m.output = call.tensor("output", Type::kInt32, 3);
  m.errors = call.tensor("comm.errors", Type::kInt32, 1);
  m.tagged = call.flag("tagged");
  m.exchanged = false;
  const int words = m.tagged ? kTaggedWords : kRowWords;
  const Tensor recv =
      call.tensor(m.tagged ? "comm.tagged_recv" : "comm.recv", m.tagged ? Type::kInt64 : Type::kInt32, 5);
  const Tensor expected = call.optional_tensor("comm.expected_generations", Type::kInt32, 3);
  call.expect_shape(recv, "[slot sets, world_size, heads_per_rank, capacity, words", kSlotSets, m.world_size,
                    m.heads_per_rank, m.capacity, words);
  call.expect_contiguous(recv);
  call.expect_shape(expected, "[slot sets, heads_per_rank, capacity", kSlotSets, m.heads_per_rank, m.capacity);
  call.expect_contiguous(expected);
  if (m.tagged && !expected) call.fail("comm.expected_generations must be a tensor for tagged rows, was None");
  if (!call.ok()) return;
  m.row_stride = words;
  m.head_stride = static_cast<int64_t>(m.capacity) * words;
  m.source_stride = m.heads_per_rank * m.head_stride;
  m.recv = recv.data<char>() + m.slot * m.world_size * m.source_stride * (m.tagged ? 8 : 4);
  m.expected = expected ? expected.data<int>() + static_cast<int64_t>(m.slot) * m.heads_per_rank * m.capacity : nullptr;
}

int check_publish_half(Call& call, const Facade& f) {
  const int layout = check_score(call, f.score, true);
  if (!call.ok()) return 0;
  check_plane(call, f.score.scores);
  check_publish(call, f.publish, f.score.index_q.size(0));
  return layout;
}

}  // namespace

// decode_score(launch, index_q, index_k, block_table, seq_lens, score_out, rank, world_size, page_size,
//              max_decode_query_len, decode_query_len, enable_pdl)
MSA_EXPORT __tvm_ffi_decode_score(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = call.flag("launch");
  if (launches) call.require_cuda();
  Score s;
  take_score_tensors(call, &s, "score_out");
  take_rank(call, &s.rank, &s.world_size);
  s.page_size = take_one_of(call, "page_size", 128, 256);
  const int max_query_len = as_int(call.integer("max_decode_query_len", 1, kMaxQueryLen));
  s.query_len = as_int(call.integer("decode_query_len", 1, max_query_len));
  s.enable_pdl = call.flag("enable_pdl");
  const int layout = check_score(call, s, false);
  check_plane(call, s.scores);
  if (call.ok() && launches && s.index_q.size(0) > 0) {
    Device* device = ready_device(call);
    if (call.ok()) {
      DecodeScoreParams params = score_params(s);
      Launch chain[] = {score_launch(s, layout, &params, *device)};
      launch(call, device, chain, 1);
    }
  }
  return call.finish();
}

// select_publish(launch, scores, num_valid_pages, recv_bases, errors, slot, rank, world_size, heads_per_rank, capacity,
//                force_begin_blocks, force_end_blocks, spin_limit, enable_pdl, generations, index_scale, index_offset)
MSA_EXPORT __tvm_ffi_select_publish(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = call.flag("launch");
  if (launches) call.require_cuda();
  Publish p;
  p.scores = call.tensor("scores", Type::kFloat32, 3);
  p.num_valid_pages = call.tensor("num_valid_pages", Type::kInt32, 1);
  p.recv_bases = call.tensor("recv_bases", Type::kInt64, 1);
  p.errors = call.tensor("errors", Type::kInt32, 1);
  p.slot = as_int(call.integer("slot", 0, kSlotSets - 1));
  take_rank(call, &p.rank, &p.world_size);
  p.heads_per_rank = take_heads_per_rank(call, p.world_size);
  p.capacity = as_int(call.integer("capacity", 1, INT32_MAX));
  p.force_begin_blocks = as_int(call.integer("force_begin_blocks", 0, kTopK));
  p.force_end_blocks = as_int(call.integer("force_end_blocks", 0, kTopK));
  p.spin_limit = as_int(call.integer("spin_limit", 1, INT32_MAX));
  p.enable_pdl = call.flag("enable_pdl");
  p.generations = call.optional_tensor("generations", Type::kInt32, 3);
  p.index_scale = as_int(call.integer("index_scale", 1, 2));
  p.index_offset = as_int(call.integer("index_offset", 0, 1));
  call.expect_shape(p.scores, "[tokens, heads, columns", kAny, kHeads, kAny);
  call.expect_size(p.scores, 2, 1, kMaxScoreColumns - 1, "score columns");
  check_plane(call, p.scores);
  const int64_t tokens = call.ok() ? p.scores.size(0) : 0;
  check_publish(call, p, tokens);
  if (call.ok() && launches && tokens > 0) {
    Device* device = ready_device(call);
    if (call.ok()) {
      SelectPublishParams params = publish_params(p, *device);
      Launch chain[] = {publish_launch(p, tokens, &params)};
      launch(call, device, chain, 1);
    }
  }
  return call.finish();
}

// merge(launch, num_valid_pages, output, errors, init_blocks, local_blocks, spin_limit, enable_pdl, prefill, tagged,
//       recv_slot, expected_generations)
MSA_EXPORT __tvm_ffi_merge(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = call.flag("launch");
  if (launches) call.require_cuda();
  MergeCall m = {};
  m.rank = m.slot = -1;
  m.num_valid_pages = call.tensor("num_valid_pages", Type::kInt32, 1);
  m.output = call.tensor("output", Type::kInt32, 3);
  m.errors = call.tensor("errors", Type::kInt32, 1);
  m.init_blocks = as_int(call.integer("init_blocks", 0, INT32_MAX));
  m.local_blocks = as_int(call.integer("local_blocks", 0, INT32_MAX));
  m.spin_limit = as_int(call.integer("spin_limit", 1, INT32_MAX));
  m.enable_pdl = call.flag("enable_pdl");
  m.exchanged = call.flag("prefill");
  m.tagged = call.flag("tagged");
  const int words = m.tagged ? kTaggedWords : kRowWords;
  const Tensor recv = call.tensor("recv_slot", m.tagged ? Type::kInt64 : Type::kInt32, 4);
  const Tensor expected = call.optional_tensor("expected_generations", Type::kInt32, 2);
  if (call.ok() && m.exchanged && m.tagged)
    call.fail("expected_generations must be None with prefill=True, was a tensor");
  if (call.ok() && m.exchanged && m.enable_pdl) call.fail("enable_pdl must be False with prefill=True, was True");
  call.expect_shape(recv, "[world_size, heads_per_rank, capacity, words", kAny, kAny, kAny, words);
  call.expect_unit_last_stride(recv);
  for (int axis = 0; axis < 3; ++axis)
    call.expect_size(recv, axis, 0, INT32_MAX, "world_size, heads_per_rank, capacity");
  if (call.ok()) {
    m.world_size = as_int(recv.size(0));
    m.heads_per_rank = as_int(recv.size(1));
    m.capacity = as_int(recv.size(2));
    if ((m.world_size != 2 && m.world_size != 4) || m.world_size * m.heads_per_rank != kHeads) {
      call.fail(
          "recv_slot must have shape [world_size, 4 / world_size, capacity, %d] with world_size 2 or 4, was [%d, %d, "
          "%d, %d]",
          words, m.world_size, m.heads_per_rank, m.capacity, words);
    }
  }
  if (call.ok()) {
    m.row_stride = recv.stride(2);
    m.head_stride = recv.stride(1);
    m.source_stride = recv.stride(0);
    call.expect_disjoint_rows(recv);
    call.expect_shape(expected, "[heads_per_rank, capacity", m.heads_per_rank, m.capacity);
    call.expect_contiguous(expected);
    m.recv = recv.data<char>();
    m.expected = expected ? expected.data<int>() : nullptr;
  }
  check_merge(call, m);
  if (call.ok() && launches && m.num_valid_pages.size(0) > 0) {
    Device* device = ready_device(call);
    if (call.ok()) {
      MergeParams params = merge_params(m, *device);
      Launch chain[] = {merge_launch(m, &params)};
      launch(call, device, chain, 1);
    }
  }
  return call.finish();
}

// decode(launch, publishes, merges, <plan>, <publishing half, if `publishes`>, <merging half, if `merges`>): the
// facade's chain, or one half of it. Everything is checked before the first launch.
MSA_EXPORT __tvm_ffi_decode(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = call.flag("launch");
  if (launches) call.require_cuda();
  const bool publishes = call.flag("publishes"), merges = call.flag("merges");
  Facade f = {};
  take_plan(call, &f);
  if (publishes) take_publish_half(call, &f);
  if (merges) take_merge_half(call, &f);
  const int layout = publishes ? check_publish_half(call, f) : kCommon;
  if (merges) check_merge(call, f.merge);
  const int64_t tokens = !call.ok()  ? 0
                         : publishes ? f.publish.num_valid_pages.size(0)
                                     : f.merge.num_valid_pages.size(0);
  if (call.ok() && launches && tokens > 0) {
    Device* device = ready_device(call);
    if (call.ok()) {
      DecodeScoreParams score;
      SelectPublishParams publish;
      MergeParams merge;
      Launch chain[3];
      int length = 0;
      if (publishes) {
        score = score_params(f.score);
        publish = publish_params(f.publish, *device);
        chain[length++] = score_launch(f.score, layout, &score, *device);
        chain[length++] = publish_launch(f.publish, tokens, &publish);
      }
      if (merges) {
        merge = merge_params(f.merge, *device);
        chain[length++] = merge_launch(f.merge, &merge);
      }
      launch(call, device, chain, length);
    }
  }
  return call.finish();
}

}  // namespace msa_icp
