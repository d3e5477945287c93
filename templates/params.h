// SPDX-License-Identifier: Apache-2.0
// Kernel parameters: the one definition that kernels and launcher share.
// No header is included, so that NVRTC compiles it too. No kernel source has an anonymous namespace: the compiler would
// mangle its names with the source's path, where a cubin should be the same wherever it is built.
#ifndef FLASHINFER_MSA_PARAMS_H_
#define FLASHINFER_MSA_PARAMS_H_

namespace msa_icp {

// Requests that one row of the decode scorer's grid plans for; larger batches take more rows.
inline constexpr int kDecodeBatchTile = 1024;

// Score columns up to which the publisher for narrow rows serves.
inline constexpr int kNarrowColumns = 1024;

enum class Wait : int { kPublish = {{ FAULT_WAITS.publish }}, kMerge = {{ FAULT_WAITS.merge }} };
enum class RowKind : int { kLegacy = {{ ROW_KINDS.legacy }}, kTagged = {{ ROW_KINDS.tagged }} };

// The first wait of a device that gives up writes this into mapped host memory before it traps, `complete` last.
// `rank` and `slot` are -1 where the call does not know them. flashinfer_msa/abi/schema.py has the fields.
struct FaultRecord {
{% for field in FAULT_FIELDS %}
  int {{ field }};
{% endfor %}
  int padding[{{ FAULT_WORDS - FAULT_FIELDS | length }}];
};

// Parameters have no undefined bytes, between their fields or after them, so that the launcher can compare them whole.
// Strides count elements of their tensor, except page_pitch, which counts bytes. A wait for a peer gives up after
// `spin_limit` polls, or after `wait_ns` nanoseconds where that is not 0.
struct DecodeScoreParams {
  const unsigned char* index_q;
  const unsigned char* index_k;
  const int* block_table;
  const int* seq_lens;
  float* scores;
  long long page_pitch;
  long long table_stride;
  long long score_token_stride;
  long long score_head_stride;
  int table_columns;
  int score_columns;
  int batch;
  int query_len;
  int rank;
  int padding;
  // Of the fused chain, which keeps lists in place of scores.
  int force_begin_blocks;
  int force_end_blocks;
  const int* num_valid_pages;
  unsigned long long* pool;
};

// The rows that a selection reads, and which of their columns are candidates.
struct SelectParams {
  const float* scores;
  const int* num_valid_pages;
  long long score_token_stride;
  long long score_head_stride;
  int tokens;
  int score_columns;
  int index_scale;
  int index_offset;
  int force_begin_blocks;
  int force_end_blocks;
};

// Where the rows of all tokens are published.
struct PublishParams {
  const long long* recv_bases;
  int* generations;
  int* errors;
  FaultRecord* fault;
  int rank;
  int world_size;
  int heads_per_rank;
  int capacity;
  int slot;
  int spin_limit;
  long long wait_ns;
};

struct SelectPublishParams {
  SelectParams select;
  PublishParams publish;
};

struct FoldPublishParams {
  const unsigned long long* pool;
  const int* seq_lens;
  int table_columns;
  int query_len;
  PublishParams publish;
};

struct MergeParams {
  void* recv;
  const int* num_valid_pages;
  int* output;
  int* expected_generations;
  int* errors;
  FaultRecord* fault;
  long long recv_source_stride;
  long long recv_head_stride;
  long long recv_row_stride;
  long long output_token_stride;
  long long output_head_stride;
  int world_size;
  int heads_per_rank;
  int capacity;
  int init_blocks;
  int local_blocks;
  int spin_limit;
  int rank;
  int slot;
  long long wait_ns;
};

// A tensor as the tensor copy engine knows it: what cuTensorMapEncodeTiled writes.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// A prefill window's work. Its segments are cut into items of kItemTokens query tokens, the blocks that an item sees
// into units of kUnitBlocks, ahead of which kItemUnits stand for its start, and the units of all items, in order, into
// one range a multiprocessor. An item is a word `1 << 48 | blocks << 32 | tile << 16 | segment`, and 0 where there is
// none; a range is `units << 32 | unit << 16 | item`: how long it is and where it starts.
struct PrefillPlanParams {
  const int* qo_segment_lens;
  const int* kv_segment_lens;
  const int* qo_offset;
  long long* work_range;
  long long* work_info;
  int* first_item;  // of each segment; scratch
  int* end_unit;    // of each item; scratch
  int batch;
  int max_items;
  int max_blocks;
  int num_ranges;
};

struct PrefillScoreParams {
  TensorMap query_map;  // rows of all tokens and heads; where the kernel takes tensor maps
  TensorMap key_map;    // pages of rows
  const unsigned char* query;
  const unsigned char* keys;
  const int* block_table;
  const int* qo_segment_lens;
  const int* kv_segment_lens;
  const int* qo_segment_offsets;
  const int* qo_offset;
  const long long* work_range;
  const long long* work_info;
  float* scores;
  unsigned long long* pool;  // this and what follows it: of the fused chain, which keeps lists in place of scores
  const int* num_valid_pages;
  int force_begin_blocks;
  int force_end_blocks;
  long long page_pitch;
  long long table_stride;
  long long score_token_stride;
  long long score_head_stride;
  int max_items;
  int max_blocks;
  int tokens;
  int rank;
  int aligned_scores;  // whether 4 scores from a multiple of 4 columns on are 16 aligned bytes in every row
  int padding[9];
};

// CTAs of an item in the fused prefill chain's fold, and tokens of each CTA after those, which look for tokens of no
// segment.
inline constexpr int kFoldCtasPerItem = 4;
inline constexpr int kFoldSweepTokens = 256;

// The fused prefill chain's pool holds, for each piece of an item that a CTA has scored, the 16 best keys of each of
// the item's kItemTokens * kHeads rows, in descending order. A CTA's pieces are of items in a row, and the next CTA's
// start with the last of them or after it: piece `item + CTA`.
struct PrefillFoldParams {
  const unsigned long long* pool;
  const int* qo_segment_lens;
  const int* qo_segment_offsets;
  const long long* work_range;
  const long long* work_info;
  const int* num_valid_pages;
  int* carrier;
  long long carrier_head_stride;
  long long carrier_row_stride;
  int batch;
  int max_items;
  int max_blocks;
  int num_ranges;
  int tokens;
  int index_scale;
  int index_offset;
  int force_begin_blocks;
  int force_end_blocks;
  int padding;
};

struct PrefillFillParams {
  float* scores;
  long long score_token_stride;
  long long score_head_stride;
  int score_columns;
};

struct SelectPrefillParams {
  SelectParams select;
  int* carrier;
  long long carrier_head_stride;
  long long carrier_row_stride;
};

}  // namespace msa_icp

#endif  // FLASHINFER_MSA_PARAMS_H_
