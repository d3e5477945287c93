// SPDX-License-Identifier: Apache-2.0
// Recording chains, and launching what was recorded.
#include "launch_record.h"

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

// Takes a query, and keys that differ from the recorded ones only in their address.
void take_query_and_keys(Call& call, const LaunchRecord& r, Tensor* query, Tensor* keys) {
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

// Puts the addresses of a query and keys into the parameters of the chain's scorer.
void set_addresses(Call& call, LaunchRecord* r, const unsigned char* query, const unsigned char* keys,
                   const Device& device) {
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

// Takes the address of a launch record; what follows must be on its device.
LaunchRecord* take_record(Call& call) {
  auto* r = reinterpret_cast<LaunchRecord*>(static_cast<intptr_t>(call.integer("address", 1, INT64_MAX)));
  if (!call.ok()) return nullptr;
  call.require_cuda();
  call.expect_device(r->device, "the step");
  return r;
}

// Which launches of a record are meant.
struct Range {
  int first, end;
};

Range take_range(Call& call) {
  Range range;
  range.first = as_int(call.integer("first", 0, kMaxRecordedLaunches));
  range.end = as_int(call.integer("end", range.first, kMaxRecordedLaunches));
  return range;
}

// Takes a query and keys, and binds the record to them. Returns its device, or null with the call failed.
Device* bind(Call& call, LaunchRecord* r) {
  Tensor query, keys;
  take_query_and_keys(call, *r, &query, &keys);
  Device* device = call.ok() ? ready_device(call) : nullptr;
  if (device == nullptr) return nullptr;
  set_addresses(call, r, query.data<unsigned char>() + r->first_token * kHeads * kHeadDim, keys.data<unsigned char>(),
                *device);
  return device;
}

void launch_range(Call& call, Device* device, LaunchRecord* r, Range range) {
  Launch chain[kMaxRecordedLaunches];
  int length = 0;
  for (int i = range.first; i < range.end && i < r->length; ++i) {
    const LaunchRecord::Entry& e = r->entries[i];
    chain[length++] = {e.layout, e.role, e.grid_x, e.grid_y, Params(r->params[i], e.params_bytes), e.dependent != 0};
  }
  if (call.ok()) launch(call, device, chain, length);
}

}  // namespace

void record(Call& call, const Launch* chain, int length, const Tensor* keys) {
  LaunchRecord* r = call.record();
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

// launch_record_words() -> int64 words of a launch record
MSA_EXPORT __tvm_ffi_launch_record_words(void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  set_result(result, sizeof(LaunchRecord) / sizeof(int64_t));
  return 0;
}

// set_query_tokens(record, tokens, first_token): queries that the record is bound to have so many tokens, and those of
// the chain begin at the first.
MSA_EXPORT __tvm_ffi_set_query_tokens(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  auto* r = call.host_struct<LaunchRecord>("record");
  const int64_t tokens = call.integer("tokens", 0, kMaxTokens), first_token = call.integer("first_token", 0, tokens);
  if (call.ok()) {
    r->tokens = tokens;
    r->first_token = first_token;
  }
  return call.finish();
}

// bind(address, index_q, index_k): binds the record at an address to this query and these keys, and launches nothing.
MSA_EXPORT __tvm_ffi_bind(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  LaunchRecord* r = take_record(call);
  if (call.ok() && r->length > 0) bind(call, r);
  return call.finish();
}

// replay(address, first, end, index_q, index_k): binds the record like `bind`, and launches `first` to `end` of it.
MSA_EXPORT __tvm_ffi_replay(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  LaunchRecord* r = take_record(call);
  const Range range = take_range(call);
  if (!call.ok() || r->length == 0) return call.finish();
  Device* device = bind(call, r);
  if (device != nullptr) launch_range(call, device, r, range);
  return call.finish();
}

// replay_bound(address, first, end, num_valid_pages): launches `first` to `end` of the record at an address as it is
// bound, on the current stream of the device that num_valid_pages is on.
MSA_EXPORT __tvm_ffi_replay_bound(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  LaunchRecord* r = take_record(call);
  const Range range = take_range(call);
  if (!call.ok() || r->length == 0) return call.finish();
  call.tensor("num_valid_pages", Type::kInt32, 1);
  Device* device = call.ok() ? ready_device(call) : nullptr;
  if (device != nullptr) launch_range(call, device, r, range);
  return call.finish();
}

// first_difference(record, record) -> the first launch in which two records differ, or -1
MSA_EXPORT __tvm_ffi_first_difference(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  Call call(args, count);
  const auto* a = call.host_struct<LaunchRecord>("record");
  const auto* b = call.host_struct<LaunchRecord>("record");
  if (!call.ok()) return call.finish();
  int64_t different = memcmp(a, b, offsetof(LaunchRecord, entries)) == 0 ? -1 : 0;
  for (int i = 0; i < kMaxRecordedLaunches && different < 0; ++i) {
    if (memcmp(&a->entries[i], &b->entries[i], sizeof(LaunchRecord::Entry)) != 0 ||
        memcmp(a->params[i], b->params[i], kMaxParamsBytes) != 0) {
      different = i;
    }
  }
  set_result(result, different);
  return call.finish();
}

}  // namespace msa_icp
