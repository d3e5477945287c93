// SPDX-License-Identifier: Apache-2.0
// Driver errors as a call's.
#include "context.h"

namespace msa_icp {
namespace {

const char* describe(const Driver* driver, CUresult result) {
  const char* text = nullptr;
  return driver->cuGetErrorString(result, &text) == kCudaSuccess && text ? text : "unknown error";
}

}  // namespace

bool check(Call& call, const Driver* driver, CUresult result, const char* what) {
  if (result == kCudaSuccess) return true;
  call.fail_as("RuntimeError", "%s failed: %s (CUDA error %d)", what, describe(driver, result), result);
  return false;
}

const Driver* require_driver(Call& call) {
  const char* why = nullptr;
  const Driver* found = driver(&why);
  if (found == nullptr) call.fail_as("RuntimeError", "%s", why);
  return found;
}

}  // namespace msa_icp
