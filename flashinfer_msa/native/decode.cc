// SPDX-License-Identifier: Apache-2.0
// The decode operations of flashinfer_msa.msa_ops, and the merge that prefill uses too: argument checks, kernel
// parameters, launches. Each takes `launch` first, then its arguments in the order in which the code takes them.
#include <tvm/ffi/c_api.h>

#include "arguments.h"

namespace msa_icp {
namespace {

constexpr int64_t kMaxBatch = int64_t{65535} * kDecodeBatchTile;
constexpr int kRowsPerTile = 8;  // query rows of one tensor-core tile

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
  Tensor index_q, seq_lens, scores;
  Keys index_k;
  int rank, world_size, page_size, query_len;
  bool enable_pdl;
};

void take_score_tensors(Call& call, Score* s, const char* scores_name) {
  s->index_q = call.tensor("index_q", Type::kE4M3, 3);
  s->index_k = take_keys(call, "index_k");
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
  check_keys(call, s.index_k, info, batch, 0);
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

DecodeScoreParams score_params(const Score& s) {
  DecodeScoreParams p = {};
  p.index_q = s.index_q.data<unsigned char>();
  p.index_k = s.index_k.keys.data<unsigned char>();
  p.block_table = s.index_k.block_table.data<int>();
  p.seq_lens = s.seq_lens.data<int>();
  p.scores = s.scores.data<float>();
  p.page_pitch = s.index_k.keys.stride(0);
  p.table_stride = s.index_k.block_table.stride(0);
  p.score_token_stride = s.scores.stride(0);
  p.score_head_stride = s.scores.stride(1);
  p.table_columns = as_int(s.index_k.block_table.size(1) < kMaxBlocks ? s.index_k.block_table.size(1) : kMaxBlocks);
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
  Selection selection;
  Tensor recv_bases, errors, generations;
  int slot, rank, world_size, heads_per_rank, capacity, spin_limit;
  const char* capacity_name = "capacity";
  bool enable_pdl;
};

void check_errors(Call& call, const Tensor& errors) {
  call.expect_contiguous(errors);
  call.expect_size(errors, 0, 1, INT64_MAX, "the error count");
}

void check_publish(Call& call, const Publish& p, int64_t tokens) {
  if (!call.ok()) return;
  if (tokens > p.capacity) {
    call.fail("%s must be at least the number of tokens, %lld, was %d", p.capacity_name, static_cast<long long>(tokens),
              p.capacity);
  }
  check_selection(call, p.selection, tokens);
  call.expect_shape(p.recv_bases, "[world_size", p.world_size);
  call.expect_contiguous(p.recv_bases);
  check_errors(call, p.errors);
  call.expect_shape(p.generations, "[slot sets, heads, capacity", kSlotSets, kHeads, p.capacity);
  call.expect_contiguous(p.generations);
}

SelectPublishParams publish_params(const Publish& p, int64_t tokens, const Device& device) {
  SelectPublishParams out = {};
  out.select = select_params(p.selection, tokens);
  out.recv_bases = p.recv_bases.data<long long>();
  out.generations = p.generations ? p.generations.data<int>() : nullptr;
  out.errors = p.errors.data<int>();
  out.fault = device.fault_on_device;
  out.rank = p.rank;
  out.world_size = p.world_size;
  out.heads_per_rank = p.heads_per_rank;
  out.capacity = p.capacity;
  out.slot = p.slot;
  out.spin_limit = p.spin_limit;
  return out;
}

Launch publish_launch(const Publish& p, int64_t tokens, SelectPublishParams* params) {
  const bool wide = p.selection.scores.size(2) > kNarrowColumns, tagged = static_cast<bool>(p.generations);
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
  if (m.errors) check_errors(call, m.errors);
}

// Checks one slot set or exchanged carrier `[world_size, heads_per_rank, capacity, words]`, and notes where its rows
// lie.
void check_rows(Call& call, const Tensor& recv, int words, MergeCall* m) {
  call.expect_shape(recv, "[world_size, heads_per_rank, capacity, words", kAny, kAny, kAny, words);
  call.expect_unit_last_stride(recv);
  for (int axis = 0; axis < 3; ++axis)
    call.expect_size(recv, axis, 0, INT32_MAX, "world_size, heads_per_rank, capacity");
  if (!call.ok()) return;
  m->world_size = as_int(recv.size(0));
  m->heads_per_rank = as_int(recv.size(1));
  m->capacity = as_int(recv.size(2));
  if ((m->world_size != 2 && m->world_size != 4) || m->world_size * m->heads_per_rank != kHeads) {
    call.fail(
        "%s must have shape [world_size, 4 / world_size, capacity, %d] with world_size 2 or 4, was [%d, %d, %d, %d]",
        recv.name, words, m->world_size, m->heads_per_rank, m->capacity, words);
  }
  call.expect_disjoint_rows(recv);
  m->row_stride = recv.stride(2);
  m->head_stride = recv.stride(1);
  m->source_stride = recv.stride(0);
  m->recv = recv.data<char>();
}

MergeParams merge_params(const MergeCall& m, const Device& device) {
  MergeParams p = {};
  p.recv = m.recv;
  p.num_valid_pages = m.num_valid_pages.data<int>();
  p.output = m.output.data<int>();
  p.expected_generations = m.expected;
  p.errors = m.errors ? m.errors.data<int>() : nullptr;
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
  f->publish.selection.force_begin_blocks = f->merge.init_blocks = init_blocks;
  f->publish.selection.force_end_blocks = f->merge.local_blocks = local_blocks;
  f->publish.spin_limit = f->merge.spin_limit = spin_limit;
  f->publish.slot = f->merge.slot = slot;
  f->score.enable_pdl = f->publish.enable_pdl = f->merge.enable_pdl = enable_pdl;
}

// Takes what the publishing half adds.
void take_publish_half(Call& call, Facade* f) {
  take_score_tensors(call, &f->score, "scores");
  f->publish.selection.num_valid_pages = call.tensor("num_valid_pages", Type::kInt32, 1);
  f->publish.generations = call.optional_tensor("comm.publish_generations", Type::kInt32, 3);
  f->publish.recv_bases =
      call.tensor(f->publish.generations ? "comm.tagged_recv_bases" : "comm.recv_bases", Type::kInt64, 1);
  f->publish.errors = call.tensor("comm.errors", Type::kInt32, 1);
  f->score.page_size = as_int(call.integer("page_size", 1, INT32_MAX));
  const int max_query_len = as_int(call.integer("max_decode_query_len", 1, kMaxQueryLen));
  f->score.query_len = as_int(call.integer("decode_query_len", 1, max_query_len));
  take_index_map(call, &f->publish.selection);
  f->publish.selection.scores = f->score.scores;
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
  const bool launches = take_launch(call);
  Score s;
  take_score_tensors(call, &s, "score_out");
  take_rank(call, &s.rank, &s.world_size);
  s.page_size = take_one_of(call, "page_size", 128, 256);
  const int max_query_len = as_int(call.integer("max_decode_query_len", 1, kMaxQueryLen));
  s.query_len = as_int(call.integer("decode_query_len", 1, max_query_len));
  s.enable_pdl = call.flag("enable_pdl");
  const int layout = check_score(call, s, false);
  check_plane(call, s.scores);
  DecodeScoreParams params;
  return finish<1>(call, launches && s.index_q && s.index_q.size(0) > 0, [&](Device& device, Launch* chain) {
    params = score_params(s);
    chain[0] = score_launch(s, layout, &params, device);
    return 1;
  });
}

// select_publish(launch, scores, num_valid_pages, recv_bases, errors, slot, rank, world_size, heads_per_rank, capacity,
//                force_begin_blocks, force_end_blocks, spin_limit, enable_pdl, generations, index_scale, index_offset)
MSA_EXPORT __tvm_ffi_select_publish(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  Publish p;
  p.selection.scores = call.tensor("scores", Type::kFloat32, 3);
  p.selection.num_valid_pages = call.tensor("num_valid_pages", Type::kInt32, 1);
  p.recv_bases = call.tensor("recv_bases", Type::kInt64, 1);
  p.errors = call.tensor("errors", Type::kInt32, 1);
  p.slot = as_int(call.integer("slot", 0, kSlotSets - 1));
  take_rank(call, &p.rank, &p.world_size);
  p.heads_per_rank = take_heads_per_rank(call, p.world_size);
  p.capacity = as_int(call.integer("capacity", 1, INT32_MAX));
  take_forced_blocks(call, &p.selection);
  p.spin_limit = as_int(call.integer("spin_limit", 1, INT32_MAX));
  p.enable_pdl = call.flag("enable_pdl");
  p.generations = call.optional_tensor("generations", Type::kInt32, 3);
  take_index_map(call, &p.selection);
  check_selected_plane(call, p.selection.scores);
  const int64_t tokens = call.ok() ? p.selection.scores.size(0) : 0;
  check_publish(call, p, tokens);
  SelectPublishParams params;
  return finish<1>(call, launches && tokens > 0, [&](Device& device, Launch* chain) {
    params = publish_params(p, tokens, device);
    chain[0] = publish_launch(p, tokens, &params);
    return 1;
  });
}

// merge(launch, num_valid_pages, output, errors, init_blocks, local_blocks, spin_limit, enable_pdl, prefill, tagged,
//       recv_slot, expected_generations)
MSA_EXPORT __tvm_ffi_merge(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
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
  check_rows(call, recv, words, &m);
  if (call.ok()) {
    call.expect_shape(expected, "[heads_per_rank, capacity", m.heads_per_rank, m.capacity);
    call.expect_contiguous(expected);
    m.expected = expected ? expected.data<int>() : nullptr;
  }
  check_merge(call, m);
  MergeParams params;
  return finish<1>(call, launches && call.ok() && m.num_valid_pages.size(0) > 0, [&](Device& device, Launch* chain) {
    params = merge_params(m, device);
    chain[0] = merge_launch(m, &params);
    return 1;
  });
}

// prefill_merge(launch, received, num_valid_pages, output, world_size, init_blocks, local_blocks): the facade's merge
// of an exchanged carrier.
MSA_EXPORT __tvm_ffi_prefill_merge(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  MergeCall m = {};
  m.rank = m.slot = -1;
  m.exchanged = true;
  const Tensor received = call.tensor("received", Type::kInt32, 4);
  m.num_valid_pages = call.tensor("num_valid_pages", Type::kInt32, 1);
  m.output = call.tensor("output", Type::kInt32, 3);
  const int64_t world_size = call.integer("world_size", 1, kHeads);
  m.init_blocks = as_int(call.integer("init_blocks", 0, INT32_MAX));
  m.local_blocks = as_int(call.integer("local_blocks", 0, INT32_MAX));
  call.expect_shape(received, "[world_size, heads_per_rank, tokens, words", world_size, kAny, kAny, kRowWords);
  check_rows(call, received, kRowWords, &m);
  check_merge(call, m);
  MergeParams params;
  return finish<1>(call, launches && call.ok() && m.num_valid_pages.size(0) > 0, [&](Device& device, Launch* chain) {
    params = merge_params(m, device);
    chain[0] = merge_launch(m, &params);
    return 1;
  });
}

// decode(launch, publishes, merges, <plan>, <publishing half, if `publishes`>, <merging half, if `merges`>): the
// facade's chain, or one half of it. Everything is checked before the first launch.
MSA_EXPORT __tvm_ffi_decode(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  const bool publishes = call.flag("publishes"), merges = call.flag("merges");
  Facade f = {};
  take_plan(call, &f);
  if (publishes) take_publish_half(call, &f);
  if (merges) take_merge_half(call, &f);
  const int layout = publishes ? check_publish_half(call, f) : kCommon;
  if (merges) check_merge(call, f.merge);
  const int64_t tokens = !call.ok()  ? 0
                         : publishes ? f.publish.selection.num_valid_pages.size(0)
                                     : f.merge.num_valid_pages.size(0);
  DecodeScoreParams score;
  SelectPublishParams publish;
  MergeParams merge;
  return finish<3>(call, launches && tokens > 0, [&](Device& device, Launch* chain) {
    int length = 0;
    if (publishes) {
      score = score_params(f.score);
      publish = publish_params(f.publish, tokens, device);
      chain[length++] = score_launch(f.score, layout, &score, device);
      chain[length++] = publish_launch(f.publish, tokens, &publish);
    }
    if (merges) {
      merge = merge_params(f.merge, device);
      chain[length++] = merge_launch(f.merge, &merge);
    }
    return length;
  });
}

}  // namespace msa_icp
