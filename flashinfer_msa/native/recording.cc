// SPDX-License-Identifier: Apache-2.0
// Keeping chains, and launching what was kept.
#include "recording.h"

#include <stddef.h>
#include <string.h>
#include <tvm/ffi/c_api.h>

#include "arguments.h"

namespace msa_icp {
namespace {

template <typename... Params>
constexpr bool can_be_recorded() {
  return (... && (__has_unique_object_representations(Params) && sizeof(Params) <= kMaxParamsBytes));
}
static_assert(can_be_recorded<DecodeScoreParams, SelectPublishParams, FoldPublishParams, MergeParams,
                              PrefillScoreParams, PrefillFoldParams, SelectPrefillParams>());

bool is_decode_scorer(int role) { return role >= kDecodeScore && role < kSelectPublish; }
bool is_prefill_scorer(int role) { return role >= kPrefillScore && role < kPrefillFold; }

// Takes a query, and keys that differ from the recorded ones in their place alone.
void take_rebound(Call& call, const Recording& r, Tensor* query, Tensor* keys) {
  *query = call.tensor("index_q", Type::kE4M3, 3);
  *keys = call.tensor("index_k", Type::kE4M3, 3);
  call.expect_shape(*query, "[tokens of the step, heads, head dim", r.tokens, kHeads, kHeadDim);
  call.expect_contiguous(*query);
  call.expect_aligned(*query, 16);
  call.expect_aligned(*keys, 16);
  call.expect_shape(*keys, "of the step's index_k, [pages, page_size / world_size, head dim", r.keys_shape);
  if (!call.ok()) return;
  for (int axis = 0; axis < 3; ++axis) {
    if (keys->stride(axis) != r.keys_strides[axis]) {
      call.fail("index_k must have stride %lld in dimension %d, like the step's, had %lld",
                static_cast<long long>(r.keys_strides[axis]), axis, static_cast<long long>(keys->stride(axis)));
      return;
    }
  }
}

void rebind(Call& call, Recording* r, const unsigned char* query, const unsigned char* keys, const Device& device) {
  for (int i = 0; i < r->length; ++i) {
    if (is_decode_scorer(r->entries[i].role)) {
      auto* p = reinterpret_cast<DecodeScoreParams*>(r->params[i]);
      p->index_q = query;
      p->index_k = keys;
    } else if (is_prefill_scorer(r->entries[i].role)) {
      auto* p = reinterpret_cast<PrefillScoreParams*>(r->params[i]);
      if (p->query == query && p->keys == keys) continue;
      p->query = query;
      p->keys = keys;
      if (takes_tensor_maps(device)) set_tensor_maps(call, p, as_int(r->keys_shape[1]), r->keys_shape[0]);
    }
  }
}

// The recording at an address, and which of its launches are meant.
struct Part {
  Recording* recording;
  int first, end;
};

Part take_part(Call& call) {
  Part part;
  part.recording = reinterpret_cast<Recording*>(static_cast<intptr_t>(call.integer("address", 1, INT64_MAX)));
  part.first = as_int(call.integer("first", 0, kMaxRecordedLaunches));
  part.end = as_int(call.integer("end", part.first, kMaxRecordedLaunches));
  if (call.ok()) {
    call.require_cuda();
    call.expect_device(part.recording->device, "the step");
  }
  return part;
}

void launch_part(Call& call, Device* device, const Part& part) {
  Recording* r = part.recording;
  Launch chain[kMaxRecordedLaunches];
  int length = 0;
  for (int i = part.first; i < part.end && i < r->length; ++i) {
    const Recording::Entry& e = r->entries[i];
    chain[length++] = {e.layout, e.role, e.grid_x, e.grid_y, {r->params[i], e.params_bytes}, e.dependent != 0};
  }
  if (call.ok()) launch(call, device, chain, length);
}

}  // namespace

void record(Call& call, const Launch* chain, int length, const Tensor* keys) {
  Recording* r = call.recording();
  r->device = call.device().device_id;
  for (int axis = 0; keys != nullptr && axis < 3; ++axis) {
    r->keys_shape[axis] = keys->size(axis);
    r->keys_strides[axis] = keys->stride(axis);
  }
  for (int i = 0; i < length; ++i) {
    const Launch& l = chain[i];
    r->entries[i] = {l.layout, l.role, l.grid_x, l.grid_y, l.params.bytes, l.dependent};
    memcpy(r->params[i], l.params.data, l.params.bytes);
  }
  r->length = length;
}

// recording_words() -> int64 words of a recording
MSA_EXPORT __tvm_ffi_recording_words(void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  *result = {};
  result->type_index = kTVMFFIInt;
  result->v_int64 = sizeof(Recording) / sizeof(int64_t);
  return 0;
}

// place(recording, tokens, first_token): the query of a replay has so many tokens, and the chain's begin at the first.
MSA_EXPORT __tvm_ffi_place(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  auto* r = static_cast<Recording*>(call.host_words("recording", sizeof(Recording) / sizeof(int64_t)));
  const int64_t tokens = call.integer("tokens", 0, kMaxTokens), first_token = call.integer("first_token", 0, tokens);
  if (call.ok()) {
    r->tokens = tokens;
    r->first_token = first_token;
  }
  return call.finish();
}

// replay(address, first, end, index_q, index_k): binds the recording at an address to this query and these keys, and
// launches `first` to `end` of it.
MSA_EXPORT __tvm_ffi_replay(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const Part part = take_part(call);
  if (!call.ok() || part.recording->length == 0) return call.finish();
  Recording* r = part.recording;
  Tensor query, keys;
  take_rebound(call, *r, &query, &keys);
  Device* device = call.ok() ? ready_device(call) : nullptr;
  if (device == nullptr) return call.finish();
  rebind(call, r, query.data<unsigned char>() + r->first_token * kHeads * kHeadDim, keys.data<unsigned char>(),
         *device);
  launch_part(call, device, part);
  return call.finish();
}

// replay_bound(address, first, end, valid): launches `first` to `end` of the recording at an address as it is bound, on
// the current stream of the device that num_valid_pages is on.
MSA_EXPORT __tvm_ffi_replay_bound(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const Part part = take_part(call);
  if (!call.ok() || part.recording->length == 0) return call.finish();
  call.tensor("num_valid_pages", Type::kInt32, 1);
  Device* device = call.ok() ? ready_device(call) : nullptr;
  if (device != nullptr) launch_part(call, device, part);
  return call.finish();
}

// first_difference(recording, recording) -> the first launch in which two recordings differ, or -1
MSA_EXPORT __tvm_ffi_first_difference(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  Call call(args, count);
  constexpr int64_t kWords = sizeof(Recording) / sizeof(int64_t);
  const auto* a = static_cast<const Recording*>(call.host_words("recording", kWords));
  const auto* b = static_cast<const Recording*>(call.host_words("recording", kWords));
  if (!call.ok()) return call.finish();
  int64_t different = memcmp(a, b, offsetof(Recording, entries)) == 0 ? -1 : 0;
  for (int i = 0; i < kMaxRecordedLaunches && different < 0; ++i) {
    if (memcmp(&a->entries[i], &b->entries[i], sizeof(Recording::Entry)) != 0 ||
        memcmp(a->params[i], b->params[i], kMaxParamsBytes) != 0) {
      different = i;
    }
  }
  *result = {};
  result->type_index = kTVMFFIInt;
  result->v_int64 = different;
  return call.finish();
}

}  // namespace msa_icp
