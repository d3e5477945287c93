// SPDX-License-Identifier: Apache-2.0
// Arguments that several operations share: taking them in order, checking them, and turning them into parameters.
#ifndef FLASHINFER_MSA_NATIVE_ARGUMENTS_H_
#define FLASHINFER_MSA_NATIVE_ARGUMENTS_H_

#include <stdint.h>

#include "call.h"
#include "constants.h"
#include "kernels.h"
#include "params.h"
#include "recording.h"

#define MSA_EXPORT extern "C" __attribute__((visibility("default"))) int

namespace msa_icp {

constexpr int64_t kAny = -1;
constexpr int64_t kMaxTokens = INT32_MAX / kHeads;  // a grid has a CTA for each of their rows

inline int as_int(int64_t value) { return static_cast<int>(value); }

// Takes `launch`, the first argument of every operation. Without it the call is only checked, on whatever device its
// tensors are: the torch backend checks its arguments here too. Words of a recording in its place keep the chain there.
bool take_launch(Call& call);

int take_one_of(Call& call, const char* name, int first, int second);

// Takes `rank` and the world size, under the name that the operation has for it.
void take_rank(Call& call, int* rank, int* world_size, const char* world_size_name = "world_size");

// A paged index-K cache and what finds its pages.
struct Keys {
  Tensor keys, block_table;
};

// Takes the key tensors under the names that the operation has for them.
Keys take_keys(Call& call, const char* keys_name);

// Checks key tensors of a layout; `batch` rows of the block table have at least `pages` columns.
void check_keys(Call& call, const Keys& k, const LayoutInfo& layout, int64_t batch, int64_t pages);

// A score plane's rows: unit last stride, not overlapping.
void check_plane(Call& call, const Tensor& scores);

// Checks a fused chain's pool, of which `bytes` are needed as `why` says.
void check_pool(Call& call, const Tensor& pool, int64_t bytes, const char* why);

// Which blocks of a score plane are selected.
struct Selection {
  Tensor scores, num_valid_pages;
  int force_begin_blocks, force_end_blocks, index_scale, index_offset;
};

// Takes the two counts of forced blocks, and the map from columns to blocks.
void take_forced_blocks(Call& call, Selection* s);
void take_index_map(Call& call, Selection* s);

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
      if (call.ok()) call.recording() ? record(call, chain, length, keys) : launch(call, device, chain, length);
    }
  }
  return call.finish();
}

}  // namespace msa_icp

#endif  // FLASHINFER_MSA_NATIVE_ARGUMENTS_H_
