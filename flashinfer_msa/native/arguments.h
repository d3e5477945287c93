// SPDX-License-Identifier: Apache-2.0
// Arguments that several operations share: checking them, and turning them into parameters.
#ifndef FLASHINFER_MSA_NATIVE_ARGUMENTS_H_
#define FLASHINFER_MSA_NATIVE_ARGUMENTS_H_

#include <stdint.h>

#include "call.h"
#include "constants.h"
#include "kernels.h"
#include "launch_record.h"
#include "params.h"

namespace msa_icp {

constexpr int64_t kAny = -1;
constexpr int64_t kMaxTokens = INT32_MAX / kHeads;  // a grid has a CTA for each of their rows

// Takes `launch`, the first argument of every operation. Without it the call is only checked, on whatever device its
// tensors are: the torch backend checks its arguments here too. A launch record in its place records the chain.
bool take_launch(Call& call);

// Checks a rank, which is taken before the world size.
void check_rank(Call& call, int64_t rank, int world_size);

// Checks a paged index-K cache and the block table that finds its pages; `batch` rows of the table have at least
// `pages` columns.
void check_keys(Call& call, const Tensor& keys, const Tensor& table, const LayoutInfo& layout, int64_t batch,
                int64_t pages);

// A score plane's rows: unit last stride, not overlapping.
void check_plane(Call& call, const Tensor& scores);

// Checks a fused chain's pool, of which `bytes` are needed as `why` says.
void check_pool(Call& call, const Tensor& pool, int64_t bytes, const char* why);

// Which blocks of a score plane are selected. A scorer that knows the layout needs no map from columns to blocks.
struct Selection {
  Tensor scores, num_valid_pages;
  int force_begin_blocks = 0, force_end_blocks = 0, index_scale = 1, index_offset = 0;
};

// The selection of a call, without its score plane and its map from columns to blocks.
template <typename C>
Selection forced_selection(const C& c) {
  Selection s;
  s.num_valid_pages = c.num_valid_pages;
  s.force_begin_blocks = c.force_begin_blocks;
  s.force_end_blocks = c.force_end_blocks;
  return s;
}

// The selection of a call, from a score plane.
template <typename C>
Selection mapped_selection(const C& c, const Tensor& scores) {
  Selection s = forced_selection(c);
  s.scores = scores;
  s.index_scale = c.index_scale;
  s.index_offset = c.index_offset;
  return s;
}

// Checks everything about a selection but the plane's shape and strides.
void check_selection(Call& call, const Selection& s, int64_t tokens);

// The plane as an operation of its own takes it: any number of tokens, up to the widest rows.
void check_selected_plane(Call& call, const Tensor& scores);

SelectParams select_params(const Selection& s, int64_t tokens);

// sm_90a's prefill scorers copy by tensor maps: of the query, and of `pages` pages of `rows` keys.
inline bool takes_tensor_maps(const Device& device) { return device.capability_major == 9; }
bool set_tensor_maps(Call& call, PrefillScoreParams* p, int rows, int64_t pages);

// Launches or records, if the call is one that `launches` and nothing is wrong with it, what `make(device, chain)`
// returns the length of; then ends the operation. `keys` is the index-K cache of a chain that may be recorded.
template <int kLength, typename Make>
int finish(Call& call, bool launches, Make make, const Tensor* keys = nullptr) {
  if (call.ok() && launches) {
    Device* device = ready_device(call);
    if (call.ok()) {
      Launch chain[kLength];
      const int length = make(*device, chain);
      if (call.ok()) call.record() ? record(call, chain, length, keys) : launch(call, device, chain, length);
    }
  }
  return call.finish();
}

}  // namespace msa_icp

#endif  // FLASHINFER_MSA_NATIVE_ARGUMENTS_H_
