// SPDX-License-Identifier: Apache-2.0
// A chain that has been checked and recorded rather than launched, to be launched later with another query and keys.
#ifndef FLASHINFER_MSA_NATIVE_LAUNCH_RECORD_H_
#define FLASHINFER_MSA_NATIVE_LAUNCH_RECORD_H_

#include <stdint.h>

#include "call.h"
#include "kernels.h"

namespace msa_icp {

constexpr int kMaxRecordedLaunches = 3, kMaxParamsBytes = 512;

// Lies in host memory that the caller owns. Two records of one chain are equal byte by byte.
struct LaunchRecord {
  struct Entry {
    int layout, role;
    unsigned grid_x, grid_y, params_bytes, dependent;
  };

  int64_t device;
  int64_t length;
  int64_t tokens, first_token;  // of the query that is bound, and where the chain's own tokens begin in it
  int64_t keys_shape[3], keys_strides[3];
  Entry entries[kMaxRecordedLaunches];
  alignas(64) char params[kMaxRecordedLaunches][kMaxParamsBytes];
};

// Records a chain in the launch record that `call` is for. `keys` is the index-K cache that it reads, if any.
void record(Call& call, const Launch* chain, int length, const Tensor* keys);

}  // namespace msa_icp

#endif  // FLASHINFER_MSA_NATIVE_LAUNCH_RECORD_H_
