// SPDX-License-Identifier: Apache-2.0
// The decode operations of flashinfer_msa.msa_ops, and the merges: argument checks, kernel parameters, launches. Each
// takes `launch`, then the fields of its call (calls.h).
#include <tvm/ffi/c_api.h>

#include "arguments.h"
#include "calls.h"

namespace msa_icp {
namespace {

constexpr int64_t kMaxBatch = int64_t{65535} * kDecodeBatchTile;

// ---- scorer

// A decode scorer's arguments. It writes `scores`, or the lists of the fused chain into `pool`.
struct Score {
  Tensor index_q, index_k, block_table, seq_lens, scores, pool;
  int rank, world_size, page_size, query_len;
  bool enable_pdl;
};

// A call's scorer, but for what it writes.
template <typename C>
Score make_score(const C& c, int64_t rank, int64_t world_size, int64_t page_size) {
  Score s = {};
  s.index_q = c.index_q;
  s.index_k = c.index_k;
  s.block_table = c.block_table;
  s.seq_lens = c.seq_lens;
  s.rank = as_int(rank);
  s.world_size = as_int(world_size);
  s.page_size = as_int(page_size);
  s.query_len = as_int(c.decode_query_len);
  s.enable_pdl = c.enable_pdl;
  return s;
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
  check_keys(call, s.index_k, s.block_table, info, batch, 0);
  if (s.pool) {
    check_pool(call, s.pool, tokens * kHeads * kPoolRowBytes, "bytes for the lists of every row");
    return layout;
  }
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
  check_plane(call, s.scores);
  return layout;
}

int table_columns(const Score& s) {
  const int64_t columns = s.block_table.size(1);
  return as_int(columns < kMaxBlocks ? columns : kMaxBlocks);
}

DecodeScoreParams score_params(const Score& s) {
  DecodeScoreParams p = {};
  p.index_q = s.index_q.data<unsigned char>();
  p.index_k = s.index_k.data<unsigned char>();
  p.block_table = s.block_table.data<int>();
  p.seq_lens = s.seq_lens.data<int>();
  p.page_pitch = s.index_k.stride(0);
  p.table_stride = s.block_table.stride(0);
  p.table_columns = table_columns(s);
  p.batch = as_int(s.seq_lens.size(0));
  p.query_len = s.query_len;
  p.rank = s.rank;
  if (s.pool) {
    p.pool = s.pool.data<unsigned long long>();
    p.score_columns = kMaxBlocks;
    return p;
  }
  p.scores = s.scores.data<float>();
  p.score_token_stride = s.scores.stride(0);
  p.score_head_stride = s.scores.stride(1);
  p.score_columns = as_int(s.scores.size(2));
  return p;
}

Launch score_launch(const Score& s, int layout, DecodeScoreParams* params, const Device& device) {
  const int tiles = (s.query_len * kHeads + kQueryTileRows - 1) / kQueryTileRows;
  const unsigned batch_rows = (params->batch + kDecodeBatchTile - 1) / kDecodeBatchTile;
  const Role role = (s.pool ? kDecodeListers : kDecodeScorers)[tiles - 1];
  return {layout, role, static_cast<unsigned>(device.multiprocessors), batch_rows, Params(params), s.enable_pdl};
}

// ---- publisher

struct Publish {
  Selection selection;
  PublishParams target;
  const char* capacity_name;
  bool tagged, enable_pdl;
};

void check_errors(Call& call, const Tensor& errors) {
  call.expect_contiguous(errors);
  call.expect_size(errors, 0, 1, INT64_MAX, "the error count");
}

void check_publish(Call& call, const Publish& p, int64_t tokens) {
  if (!call.ok()) return;
  if (tokens > p.target.capacity) {
    call.fail("%s must be at least the number of tokens, %lld, was %d", p.capacity_name, static_cast<long long>(tokens),
              p.target.capacity);
  }
  check_selection(call, p.selection, tokens);
}

// The publisher of a call that names its receive rows, checked.
template <typename C>
Publish make_publish(Call& call, const C& c, const Selection& selection, int64_t tokens) {
  Publish p = {};
  p.selection = selection;
  p.capacity_name = "capacity";
  p.tagged = static_cast<bool>(c.generations);
  p.enable_pdl = c.enable_pdl;
  p.target.rank = as_int(c.rank);
  p.target.world_size = c.world_size;
  p.target.heads_per_rank = call.ok() ? kHeads / c.world_size : 1;
  p.target.capacity = c.capacity;
  p.target.slot = c.slot;
  p.target.spin_limit = c.spin_limit;
  check_publish(call, p, tokens);
  call.expect_shape(c.recv_bases, "[world_size", c.world_size);
  call.expect_contiguous(c.recv_bases);
  check_errors(call, c.errors);
  call.expect_shape(c.generations, "[slot sets, heads, capacity", kSlotSets, kHeads, c.capacity);
  call.expect_contiguous(c.generations);
  if (!call.ok()) return p;
  p.target.recv_bases = c.recv_bases.template data<long long>();
  p.target.errors = c.errors.template data<int>();
  p.target.generations = p.tagged ? c.generations.template data<int>() : nullptr;
  return p;
}

// The two ways to publish: what is selected from scores, and what is folded from lists.
struct Publisher {
  SelectPublishParams select;
  FoldPublishParams fold;

  Launch launch(const Publish& p, const Score& s, int64_t tokens, const Device& device) {
    PublishParams target = p.target;
    target.fault = device.fault_on_device;
    const unsigned rows = static_cast<unsigned>(tokens * kHeads);
    if (s.pool) {
      fold = {};
      fold.pool = s.pool.data<unsigned long long>();
      fold.seq_lens = s.seq_lens.data<int>();
      fold.table_columns = table_columns(s);
      fold.query_len = s.query_len;
      fold.publish = target;
      return {kCommon, kFoldPublishers[p.tagged], rows, 1, Params(&fold), p.enable_pdl};
    }
    select.select = select_params(p.selection, tokens);
    select.publish = target;
    const bool wide = p.selection.scores.size(2) > kNarrowColumns;
    return {kCommon, kSelectPublishers[wide][p.tagged], rows, 1, Params(&select), p.enable_pdl};
  }
};

// What the fused scorer takes of the selection.
void fuse(const Publish& p, DecodeScoreParams* params) {
  params->num_valid_pages = p.selection.num_valid_pages.data<int>();
  params->force_begin_blocks = p.selection.force_begin_blocks;
  params->force_end_blocks = p.selection.force_end_blocks;
}

// ---- merge

struct Merge {
  Tensor num_valid_pages, output;
  MergeParams params;
  bool enable_pdl, tagged, exchanged;
};

void check_merge(Call& call, const Merge& m) {
  if (!call.ok()) return;
  const int64_t tokens = m.num_valid_pages.size(0);
  call.expect_contiguous(m.num_valid_pages);
  call.expect_size(m.num_valid_pages, 0, 0, kMaxTokens, "query tokens");
  if (tokens > m.params.capacity) {
    call.fail("num_valid_pages must have at most capacity = %d tokens, had %lld", m.params.capacity,
              static_cast<long long>(tokens));
  }
  call.expect_shape(m.output, "[tokens, heads_per_rank, 16", tokens, m.params.heads_per_rank, kTopK);
  call.expect_unit_last_stride(m.output);
  call.expect_disjoint_rows(m.output);
}

// Checks one slot set or exchanged carrier `[world_size, heads_per_rank, capacity, words]`, and notes where its rows
// lie.
void check_rows(Call& call, const Tensor& recv, int words, MergeParams* p) {
  call.expect_shape(recv, "[world_size, heads_per_rank, capacity, words", kAny, kAny, kAny, words);
  call.expect_unit_last_stride(recv);
  for (int axis = 0; axis < 3; ++axis)
    call.expect_size(recv, axis, 0, INT32_MAX, "world_size, heads_per_rank, capacity");
  if (!call.ok()) return;
  p->world_size = as_int(recv.size(0));
  p->heads_per_rank = as_int(recv.size(1));
  p->capacity = as_int(recv.size(2));
  if ((p->world_size != 2 && p->world_size != 4) || p->world_size * p->heads_per_rank != kHeads) {
    call.fail(
        "%s must have shape [world_size, 4 / world_size, capacity, %d] with world_size 2 or 4, was [%d, %d, %d, %d]",
        recv.name, words, p->world_size, p->heads_per_rank, p->capacity, words);
  }
  call.expect_disjoint_rows(recv);
  p->recv_row_stride = recv.stride(2);
  p->recv_head_stride = recv.stride(1);
  p->recv_source_stride = recv.stride(0);
  p->recv = recv.data<char>();
}

Launch merge_launch(Merge* m, const Device& device) {
  MergeParams& p = m->params;
  p.num_valid_pages = m->num_valid_pages.data<int>();
  p.output = m->output.data<int>();
  p.output_token_stride = m->output.stride(0);
  p.output_head_stride = m->output.stride(1);
  p.fault = device.fault_on_device;
  const Role role = kMerges[p.world_size == 4][m->exchanged ? 2 : m->tagged];
  const unsigned rows = static_cast<unsigned>(m->num_valid_pages.size(0) * p.heads_per_rank);
  return {kCommon, role, rows, 1, Params(&p), m->enable_pdl};
}

// The merge of a call that names its rows, which knows neither rank nor slot.
template <typename C>
Merge make_merge(const C& c, bool exchanged) {
  Merge m = {};
  m.num_valid_pages = c.num_valid_pages;
  m.output = c.output;
  m.exchanged = exchanged;
  m.params.rank = m.params.slot = -1;
  m.params.init_blocks = c.init_blocks;
  m.params.local_blocks = c.local_blocks;
  return m;
}

int finish_merge(Call& call, bool launches, Merge* m) {
  return finish<1>(call, launches && call.ok() && m->num_valid_pages.size(0) > 0, [&](Device& device, Launch* chain) {
    chain[0] = merge_launch(m, device);
    return 1;
  });
}

// ---- the indexer's chain

template <typename T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(static_cast<intptr_t>(address));
}

Publish make_publish(const ChainState& state, const calls::Decode& c) {
  Publish p = {};
  p.selection.scores = c.scores;
  p.selection.num_valid_pages = c.num_valid_pages;
  p.selection.force_begin_blocks = as_int(state.init_blocks);
  p.selection.force_end_blocks = as_int(state.local_blocks);
  p.selection.index_scale = as_int(state.index_scale);
  p.selection.index_offset = as_int(state.index_offset);
  p.target.recv_bases = pointer<long long>(c.tagged ? state.tagged_recv_bases : state.recv_bases);
  p.target.generations = c.tagged ? pointer<int>(state.publish_generations) : nullptr;
  p.target.errors = pointer<int>(state.errors);
  p.target.rank = as_int(state.rank);
  p.target.world_size = as_int(state.world_size);
  p.target.heads_per_rank = as_int(state.heads_per_rank);
  p.target.capacity = as_int(state.capacity);
  p.target.slot = c.slot;
  p.target.spin_limit = as_int(state.spin_limit);
  p.target.wait_ns = state.wait_ns;
  p.capacity_name = "max_decode_tokens";
  p.tagged = c.tagged;
  p.enable_pdl = c.enable_pdl;
  return p;
}

Merge make_merge(const ChainState& state, const calls::Decode& c) {
  Merge m = {};
  m.num_valid_pages = c.num_valid_pages;
  m.output = c.output;
  m.tagged = c.tagged;
  m.enable_pdl = c.enable_pdl;
  MergeParams& p = m.params;
  p.rank = as_int(state.rank);
  p.slot = c.slot;
  p.world_size = as_int(state.world_size);
  p.heads_per_rank = as_int(state.heads_per_rank);
  p.capacity = as_int(state.capacity);
  p.init_blocks = as_int(state.init_blocks);
  p.local_blocks = as_int(state.local_blocks);
  p.spin_limit = as_int(state.spin_limit);
  p.wait_ns = state.wait_ns;
  p.errors = pointer<int>(state.errors);
  p.recv_row_stride = c.tagged ? kTaggedWords : kRowWords;
  p.recv_head_stride = p.capacity * p.recv_row_stride;
  p.recv_source_stride = p.heads_per_rank * p.recv_head_stride;
  const int64_t slot_set = p.world_size * p.recv_source_stride * (c.tagged ? sizeof(int64_t) : sizeof(int32_t));
  p.recv = pointer<char>(c.tagged ? state.tagged_recv : state.recv) + c.slot * slot_set;
  const int64_t counters = static_cast<int64_t>(p.heads_per_rank) * p.capacity;
  p.expected_generations = c.tagged ? pointer<int>(state.expected_generations) + c.slot * counters : nullptr;
  return m;
}

}  // namespace

// receive_storage: checks that the indexer's receive storage is memory to launch with, of one device.
MSA_EXPORT __tvm_ffi_receive_storage(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  take_launch(call);
  calls::ReceiveStorage::take(call);
  return call.finish();
}

// decode_score: the decode scorer.
MSA_EXPORT __tvm_ffi_decode_score(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  const auto c = calls::DecodeScore::take(call);
  check_rank(call, c.rank, c.world_size);
  Score s = make_score(c, c.rank, c.world_size, c.page_size);
  s.scores = c.score_out;
  const int layout = check_score(call, s, false);
  DecodeScoreParams params;
  return finish<1>(call, launches && call.ok() && s.index_q.size(0) > 0, [&](Device& device, Launch* chain) {
    params = score_params(s);
    chain[0] = score_launch(s, layout, &params, device);
    return 1;
  });
}

// select_publish: the publisher.
MSA_EXPORT __tvm_ffi_select_publish(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  const auto c = calls::SelectPublish::take(call);
  check_rank(call, c.rank, c.world_size);
  if (call.ok() && c.heads_per_rank != kHeads / c.world_size) {
    call.fail("heads_per_rank must be %d for world_size %d, was %lld", kHeads / c.world_size, c.world_size,
              static_cast<long long>(c.heads_per_rank));
  }
  check_selected_plane(call, c.scores);
  const int64_t tokens = call.ok() ? c.scores.size(0) : 0;
  const Publish p = make_publish(call, c, mapped_selection(c, c.scores), tokens);
  Publisher publisher;
  return finish<1>(call, launches && tokens > 0, [&](Device& device, Launch* chain) {
    chain[0] = publisher.launch(p, Score{}, tokens, device);
    return 1;
  });
}

// score_publish: the fused chain but for its merge.
MSA_EXPORT __tvm_ffi_score_publish(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  const auto c = calls::ScorePublish::take(call);
  check_rank(call, c.rank, c.world_size);
  Score s = make_score(c, c.rank, c.world_size, c.page_size);
  s.pool = c.pool;
  const int layout = check_score(call, s, false);
  const int64_t tokens = call.ok() ? s.index_q.size(0) : 0;
  const Publish p = make_publish(call, c, forced_selection(c), tokens);
  DecodeScoreParams score;
  Publisher publisher;
  return finish<2>(call, launches && tokens > 0, [&](Device& device, Launch* chain) {
    score = score_params(s);
    fuse(p, &score);
    chain[0] = score_launch(s, layout, &score, device);
    chain[1] = publisher.launch(p, s, tokens, device);
    return 2;
  });
}

// merge: the merge of decode's receive rows, or with `prefill` of an exchanged carrier.
MSA_EXPORT __tvm_ffi_merge(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  const auto c = calls::Merge::take(call);
  if (call.ok() && c.prefill && c.tagged)
    call.fail("expected_generations must be None with prefill=True, was a tensor");
  if (call.ok() && c.prefill && c.enable_pdl) call.fail("enable_pdl must be False with prefill=True, was True");
  Merge m = make_merge(c, c.prefill);
  m.params.spin_limit = c.spin_limit;
  m.enable_pdl = c.enable_pdl;
  m.tagged = c.tagged;
  check_rows(call, c.recv_slot, m.tagged ? kTaggedWords : kRowWords, &m.params);
  if (call.ok()) {
    call.expect_shape(c.expected_generations, "[heads_per_rank, capacity", m.params.heads_per_rank, m.params.capacity);
    call.expect_contiguous(c.expected_generations);
  }
  check_merge(call, m);
  check_errors(call, c.errors);
  if (call.ok()) {
    m.params.expected_generations = c.expected_generations ? c.expected_generations.data<int>() : nullptr;
    m.params.errors = c.errors.data<int>();
  }
  return finish_merge(call, launches, &m);
}

// prefill_merge: the indexer's merge of an exchanged carrier.
MSA_EXPORT __tvm_ffi_prefill_merge(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  const auto c = calls::PrefillMerge::take(call);
  Merge m = make_merge(c, true);
  call.expect_shape(c.received, "[world_size, heads_per_rank, tokens, words", c.world_size, kAny, kAny, kRowWords);
  check_rows(call, c.received, kRowWords, &m.params);
  check_merge(call, m);
  return finish_merge(call, launches, &m);
}

// decode, which takes a ChainState before its call: the indexer's chain, or one half of it; with a pool or without
// scores, the fused one. Everything is checked before the first launch.
MSA_EXPORT __tvm_ffi_decode(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  const auto* state = call.host_struct<ChainState>("state");
  if (state == nullptr) return call.finish();
  call.expect_device(state->device, "the indexer");
  const auto c = calls::Decode::take(call);
  const int64_t tokens = call.ok() ? c.num_valid_pages.size(0) : 0;
  Score s;
  Publish p = {};
  Merge m = {};
  int layout = kCommon;
  if (c.publishes) {
    call.expect_given(c.index_q);
    call.expect_given(c.index_k);
    call.expect_given(c.block_table);
    call.expect_given(c.seq_lens);
    if (!c.pool) call.expect_given(c.scores);
    call.expect_between("decode_query_len", c.decode_query_len, 1, state->max_query_len);
    s = make_score(c, state->rank, state->world_size, state->page_size);
    s.scores = c.scores;
    s.pool = c.pool;
    layout = check_score(call, s, true);
    p = make_publish(*state, c);
    check_publish(call, p, call.ok() ? s.index_q.size(0) : 0);
  }
  if (c.merges) {
    call.expect_given(c.output);
    m = make_merge(*state, c);
    check_merge(call, m);
  }
  DecodeScoreParams score;
  Publisher publisher;
  return finish<3>(
      call, launches && tokens > 0,
      [&](Device& device, Launch* chain) {
        int length = 0;
        if (c.publishes) {
          score = score_params(s);
          fuse(p, &score);
          chain[length++] = score_launch(s, layout, &score, device);
          chain[length++] = publisher.launch(p, s, tokens, device);
        }
        if (c.merges) chain[length++] = merge_launch(&m, device);
        return length;
      },
      c.publishes ? &s.index_k : nullptr);
}

}  // namespace msa_icp
