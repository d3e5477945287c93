// SPDX-License-Identifier: Apache-2.0
// The decode operations of flashinfer_msa.msa_ops, and the merges: argument checks, kernel parameters, launches. Each
// takes `launch` first, then its arguments in the order in which the code takes them.
#include <tvm/ffi/c_api.h>

#include "arguments.h"

namespace msa_icp {
namespace {

constexpr int64_t kMaxBatch = int64_t{65535} * kDecodeBatchTile;
constexpr int kRowsPerTile = 8;  // query rows of one tensor-core tile
constexpr int64_t kPoolRowBytes = int64_t{kPoolLists} * kTopK * sizeof(unsigned long long);

int take_heads_per_rank(Call& call, int world_size) {
  const int64_t heads = call.integer("heads_per_rank", INT64_MIN, INT64_MAX);
  if (call.ok() && heads != kHeads / world_size) {
    call.fail("heads_per_rank must be %d for world_size %d, was %lld", kHeads / world_size, world_size,
              static_cast<long long>(heads));
  }
  return as_int(heads);
}

// ---- scorer

// A decode scorer's arguments. It writes `scores`, or the lists of the fused chain into `pool`.
struct Score {
  Tensor index_q, seq_lens, scores, pool;
  Keys index_k;
  int rank, world_size, page_size, query_len;
  bool enable_pdl;
};

void take_score_tensors(Call& call, Score* s) {
  s->index_q = call.tensor("index_q", Type::kE4M3, 3);
  s->index_k = take_keys(call, "index_k");
  s->seq_lens = call.tensor("seq_lens", Type::kInt32, 1);
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
  const int64_t columns = s.index_k.block_table.size(1);
  return as_int(columns < kMaxBlocks ? columns : kMaxBlocks);
}

DecodeScoreParams score_params(const Score& s) {
  DecodeScoreParams p = {};
  p.index_q = s.index_q.data<unsigned char>();
  p.index_k = s.index_k.keys.data<unsigned char>();
  p.block_table = s.index_k.block_table.data<int>();
  p.seq_lens = s.seq_lens.data<int>();
  p.page_pitch = s.index_k.keys.stride(0);
  p.table_stride = s.index_k.block_table.stride(0);
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
  const int tiles = (s.query_len * kHeads + kRowsPerTile - 1) / kRowsPerTile;
  const unsigned batch_rows = (params->batch + kDecodeBatchTile - 1) / kDecodeBatchTile;
  const int role = (s.pool ? kDecodeLists : kDecodeScore) + tiles - 1;
  return {layout, role, static_cast<unsigned>(device.multiprocessors), batch_rows, params, s.enable_pdl};
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

// Checks the receive rows that a call of its own names, and notes where they lie.
void check_target(Call& call, const Tensor& recv_bases, const Tensor& errors, const Tensor& generations, Publish* p) {
  call.expect_shape(recv_bases, "[world_size", p->target.world_size);
  call.expect_contiguous(recv_bases);
  check_errors(call, errors);
  call.expect_shape(generations, "[slot sets, heads, capacity", kSlotSets, kHeads, p->target.capacity);
  call.expect_contiguous(generations);
  if (!call.ok()) return;
  p->target.recv_bases = recv_bases.data<long long>();
  p->target.errors = errors.data<int>();
  p->tagged = static_cast<bool>(generations);
  p->target.generations = p->tagged ? generations.data<int>() : nullptr;
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
      return {kCommon, kFoldPublish + p.tagged, rows, 1, &fold, p.enable_pdl};
    }
    select.select = select_params(p.selection, tokens);
    select.publish = target;
    const bool wide = p.selection.scores.size(2) > kNarrowColumns;
    return {kCommon, kSelectPublish + 2 * wide + p.tagged, rows, 1, &select, p.enable_pdl};
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
  const int role = kMerge + (p.world_size == 4 ? 3 : 0) + (m->exchanged ? 2 : m->tagged ? 1 : 0);
  const unsigned rows = static_cast<unsigned>(m->num_valid_pages.size(0) * p.heads_per_rank);
  return {kCommon, role, rows, 1, &p, m->enable_pdl};
}

// ---- the facade's chain

// What a chain takes from its plan and receive storage, which the facade has checked: int64 words in host memory, in
// this order (flashinfer_msa/indexer.py packs them).
struct ChainState {
  int64_t device;  // index, or -1 for the CPU
  int64_t rank, world_size, heads_per_rank, capacity, init_blocks, local_blocks, spin_limit, wait_ns;
  int64_t page_size, max_query_len, index_scale, index_offset;
  int64_t recv, tagged_recv, recv_bases, tagged_recv_bases, publish_generations, expected_generations, errors;
};

const ChainState* take_state(Call& call) {
  return static_cast<const ChainState*>(call.host_words("state", sizeof(ChainState) / sizeof(int64_t)));
}

template <typename T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(static_cast<intptr_t>(address));
}

void set_publish(const ChainState& state, int slot, bool tagged, bool enable_pdl, Publish* p) {
  p->selection.force_begin_blocks = as_int(state.init_blocks);
  p->selection.force_end_blocks = as_int(state.local_blocks);
  p->selection.index_scale = as_int(state.index_scale);
  p->selection.index_offset = as_int(state.index_offset);
  p->target = {};
  p->target.recv_bases = pointer<long long>(tagged ? state.tagged_recv_bases : state.recv_bases);
  p->target.generations = tagged ? pointer<int>(state.publish_generations) : nullptr;
  p->target.errors = pointer<int>(state.errors);
  p->target.rank = as_int(state.rank);
  p->target.world_size = as_int(state.world_size);
  p->target.heads_per_rank = as_int(state.heads_per_rank);
  p->target.capacity = as_int(state.capacity);
  p->target.slot = slot;
  p->target.spin_limit = as_int(state.spin_limit);
  p->target.wait_ns = state.wait_ns;
  p->capacity_name = "max_decode_tokens";
  p->tagged = tagged;
  p->enable_pdl = enable_pdl;
}

void set_merge(const ChainState& state, int slot, bool tagged, bool enable_pdl, Merge* m) {
  MergeParams& p = m->params;
  p = {};
  p.rank = as_int(state.rank);
  p.slot = slot;
  p.world_size = as_int(state.world_size);
  p.heads_per_rank = as_int(state.heads_per_rank);
  p.capacity = as_int(state.capacity);
  p.init_blocks = as_int(state.init_blocks);
  p.local_blocks = as_int(state.local_blocks);
  p.spin_limit = as_int(state.spin_limit);
  p.wait_ns = state.wait_ns;
  p.errors = pointer<int>(state.errors);
  p.recv_row_stride = tagged ? kTaggedWords : kRowWords;
  p.recv_head_stride = p.capacity * p.recv_row_stride;
  p.recv_source_stride = p.heads_per_rank * p.recv_head_stride;
  const int64_t slot_set = p.world_size * p.recv_source_stride * (tagged ? sizeof(int64_t) : sizeof(int32_t));
  p.recv = pointer<char>(tagged ? state.tagged_recv : state.recv) + slot * slot_set;
  const int64_t counters = static_cast<int64_t>(p.heads_per_rank) * p.capacity;
  p.expected_generations = tagged ? pointer<int>(state.expected_generations) + slot * counters : nullptr;
  m->tagged = tagged;
  m->exchanged = false;
  m->enable_pdl = enable_pdl;
}

}  // namespace

// receive_storage(launch, recv, tagged_recv, recv_bases, tagged_recv_bases, publish_generations, expected_generations,
//                 errors): checks that the facade's receive storage is memory to launch with, of one device.
MSA_EXPORT __tvm_ffi_receive_storage(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  take_launch(call);
  call.tensor("comm.recv", Type::kInt32, 5);
  call.tensor("comm.tagged_recv", Type::kInt64, 5);
  call.tensor("comm.recv_bases", Type::kInt64, 1);
  call.tensor("comm.tagged_recv_bases", Type::kInt64, 1);
  call.tensor("comm.publish_generations", Type::kInt32, 3);
  call.tensor("comm.expected_generations", Type::kInt32, 3);
  call.tensor("comm.errors", Type::kInt32, 1);
  return call.finish();
}

// decode_score(launch, index_q, index_k, block_table, seq_lens, score_out, rank, world_size, page_size,
//              max_decode_query_len, decode_query_len, enable_pdl)
MSA_EXPORT __tvm_ffi_decode_score(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  Score s;
  take_score_tensors(call, &s);
  s.scores = call.tensor("score_out", Type::kFloat32, 3);
  take_rank(call, &s.rank, &s.world_size);
  s.page_size = take_one_of(call, "page_size", 128, 256);
  const int max_query_len = as_int(call.integer("max_decode_query_len", 1, kMaxQueryLen));
  s.query_len = as_int(call.integer("decode_query_len", 1, max_query_len));
  s.enable_pdl = call.flag("enable_pdl");
  const int layout = check_score(call, s, false);
  DecodeScoreParams params;
  return finish<1>(call, launches && call.ok() && s.index_q.size(0) > 0, [&](Device& device, Launch* chain) {
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
  Publish p = {};
  p.capacity_name = "capacity";
  p.selection.scores = call.tensor("scores", Type::kFloat32, 3);
  p.selection.num_valid_pages = call.tensor("num_valid_pages", Type::kInt32, 1);
  const Tensor recv_bases = call.tensor("recv_bases", Type::kInt64, 1);
  const Tensor errors = call.tensor("errors", Type::kInt32, 1);
  p.target.slot = as_int(call.integer("slot", 0, kSlotSets - 1));
  take_rank(call, &p.target.rank, &p.target.world_size);
  p.target.heads_per_rank = take_heads_per_rank(call, p.target.world_size);
  p.target.capacity = as_int(call.integer("capacity", 1, INT32_MAX));
  take_forced_blocks(call, &p.selection);
  p.target.spin_limit = as_int(call.integer("spin_limit", 1, INT32_MAX));
  p.enable_pdl = call.flag("enable_pdl");
  const Tensor generations = call.optional_tensor("generations", Type::kInt32, 3);
  take_index_map(call, &p.selection);
  check_selected_plane(call, p.selection.scores);
  const int64_t tokens = call.ok() ? p.selection.scores.size(0) : 0;
  check_publish(call, p, tokens);
  check_target(call, recv_bases, errors, generations, &p);
  Publisher publisher;
  return finish<1>(call, launches && tokens > 0, [&](Device& device, Launch* chain) {
    chain[0] = publisher.launch(p, Score{}, tokens, device);
    return 1;
  });
}

// score_publish(launch, index_q, index_k, block_table, seq_lens, num_valid_pages, pool, recv_bases, errors, rank,
//               world_size, page_size, decode_query_len, slot, capacity, force_begin_blocks, force_end_blocks,
//               spin_limit, generations, enable_pdl): the fused chain but for its merge
MSA_EXPORT __tvm_ffi_score_publish(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  Score s;
  Publish p = {};
  p.capacity_name = "capacity";
  take_score_tensors(call, &s);
  p.selection.num_valid_pages = call.tensor("num_valid_pages", Type::kInt32, 1);
  s.pool = call.tensor("pool", Type::kUInt8, 1);
  const Tensor recv_bases = call.tensor("recv_bases", Type::kInt64, 1);
  const Tensor errors = call.tensor("errors", Type::kInt32, 1);
  take_rank(call, &s.rank, &s.world_size);
  s.page_size = take_one_of(call, "page_size", 128, 256);
  s.query_len = as_int(call.integer("decode_query_len", 1, kMaxQueryLen));
  p.target.slot = as_int(call.integer("slot", 0, kSlotSets - 1));
  p.target.capacity = as_int(call.integer("capacity", 1, INT32_MAX));
  take_forced_blocks(call, &p.selection);
  p.target.spin_limit = as_int(call.integer("spin_limit", 1, INT32_MAX));
  const Tensor generations = call.optional_tensor("generations", Type::kInt32, 3);
  s.enable_pdl = p.enable_pdl = call.flag("enable_pdl");
  p.target.rank = s.rank;
  p.target.world_size = s.world_size;
  p.target.heads_per_rank = call.ok() ? kHeads / s.world_size : 1;
  p.selection.index_scale = 1;  // the scorer knows the map
  p.selection.index_offset = 0;
  const int layout = check_score(call, s, false);
  const int64_t tokens = call.ok() ? s.index_q.size(0) : 0;
  check_publish(call, p, tokens);
  check_target(call, recv_bases, errors, generations, &p);
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

// merge(launch, num_valid_pages, output, errors, init_blocks, local_blocks, spin_limit, enable_pdl, prefill, tagged,
//       expected_generations, recv_slot)
MSA_EXPORT __tvm_ffi_merge(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  Merge m = {};
  m.params.rank = m.params.slot = -1;
  m.num_valid_pages = call.tensor("num_valid_pages", Type::kInt32, 1);
  m.output = call.tensor("output", Type::kInt32, 3);
  const Tensor errors = call.tensor("errors", Type::kInt32, 1);
  m.params.init_blocks = as_int(call.integer("init_blocks", 0, INT32_MAX));
  m.params.local_blocks = as_int(call.integer("local_blocks", 0, INT32_MAX));
  m.params.spin_limit = as_int(call.integer("spin_limit", 1, INT32_MAX));
  m.enable_pdl = call.flag("enable_pdl");
  m.exchanged = call.flag("prefill");
  m.tagged = call.flag("tagged");
  const int words = m.tagged ? kTaggedWords : kRowWords;
  const Tensor expected = call.optional_tensor("expected_generations", Type::kInt32, 2);
  if (call.ok() && m.exchanged && m.tagged)
    call.fail("expected_generations must be None with prefill=True, was a tensor");
  if (call.ok() && m.exchanged && m.enable_pdl) call.fail("enable_pdl must be False with prefill=True, was True");
  const Tensor recv = call.tensor("recv_slot", m.tagged ? Type::kInt64 : Type::kInt32, 4);
  check_rows(call, recv, words, &m.params);
  if (call.ok()) {
    call.expect_shape(expected, "[heads_per_rank, capacity", m.params.heads_per_rank, m.params.capacity);
    call.expect_contiguous(expected);
    m.params.expected_generations = expected ? expected.data<int>() : nullptr;
  }
  check_merge(call, m);
  check_errors(call, errors);
  return finish<1>(call, launches && call.ok() && m.num_valid_pages.size(0) > 0, [&](Device& device, Launch* chain) {
    m.params.errors = errors.data<int>();
    chain[0] = merge_launch(&m, device);
    return 1;
  });
}

// prefill_merge(launch, received, num_valid_pages, output, world_size, init_blocks, local_blocks): the facade's merge
// of an exchanged carrier.
MSA_EXPORT __tvm_ffi_prefill_merge(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  Merge m = {};
  m.params.rank = m.params.slot = -1;
  m.exchanged = true;
  const Tensor received = call.tensor("received", Type::kInt32, 4);
  m.num_valid_pages = call.tensor("num_valid_pages", Type::kInt32, 1);
  m.output = call.tensor("output", Type::kInt32, 3);
  const int64_t world_size = call.integer("world_size", 1, kHeads);
  m.params.init_blocks = as_int(call.integer("init_blocks", 0, INT32_MAX));
  m.params.local_blocks = as_int(call.integer("local_blocks", 0, INT32_MAX));
  call.expect_shape(received, "[world_size, heads_per_rank, tokens, words", world_size, kAny, kAny, kRowWords);
  check_rows(call, received, kRowWords, &m.params);
  check_merge(call, m);
  return finish<1>(call, launches && call.ok() && m.num_valid_pages.size(0) > 0, [&](Device& device, Launch* chain) {
    chain[0] = merge_launch(&m, device);
    return 1;
  });
}

// decode(launch, state, publishes, merges, slot, tagged, enable_pdl, num_valid_pages,
//        <if publishes> index_q, index_k, block_table, seq_lens, scores, pool, decode_query_len, <if merges> output):
// the facade's chain, or one half of it; without scores, the fused one. Everything is checked before the first launch.
MSA_EXPORT __tvm_ffi_decode(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const bool launches = take_launch(call);
  const ChainState* state = take_state(call);
  const bool publishes = call.flag("publishes"), merges = call.flag("merges");
  const int slot = as_int(call.integer("slot", 0, kSlotSets - 1));
  const bool tagged = call.flag("tagged"), enable_pdl = call.flag("enable_pdl");
  if (state == nullptr || !call.ok()) return call.finish();
  call.expect_device(state->device, "the indexer");
  const Tensor num_valid_pages = call.tensor("num_valid_pages", Type::kInt32, 1);
  Score s;
  Publish p = {};
  Merge m = {};
  int layout = kCommon;
  if (publishes) {
    s.rank = as_int(state->rank);
    s.world_size = as_int(state->world_size);
    s.page_size = as_int(state->page_size);
    s.enable_pdl = enable_pdl;
    take_score_tensors(call, &s);
    s.scores = call.optional_tensor("scores", Type::kFloat32, 3);
    s.pool = call.optional_tensor("pool", Type::kUInt8, 1);
    s.query_len = as_int(call.integer("decode_query_len", 1, state->max_query_len));
    if (call.ok() && !s.scores && !s.pool) call.fail("scores must be a dense tensor, was None");
    set_publish(*state, slot, tagged, enable_pdl, &p);
    p.selection.scores = s.scores;
    p.selection.num_valid_pages = num_valid_pages;
    layout = check_score(call, s, true);
    check_publish(call, p, call.ok() ? s.index_q.size(0) : 0);
  }
  if (merges) {
    m.num_valid_pages = num_valid_pages;
    m.output = call.tensor("output", Type::kInt32, 3);
    set_merge(*state, slot, tagged, enable_pdl, &m);
    check_merge(call, m);
  }
  const int64_t tokens = call.ok() ? num_valid_pages.size(0) : 0;
  DecodeScoreParams score;
  Publisher publisher;
  return finish<3>(
      call, launches && tokens > 0,
      [&](Device& device, Launch* chain) {
        int length = 0;
        if (publishes) {
          score = score_params(s);
          fuse(p, &score);
          chain[length++] = score_launch(s, layout, &score, device);
          chain[length++] = publisher.launch(p, s, tokens, device);
        }
        if (merges) chain[length++] = merge_launch(&m, device);
        return length;
      },
      publishes ? &s.index_k.keys : nullptr);
}

}  // namespace msa_icp
