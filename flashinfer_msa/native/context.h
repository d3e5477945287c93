// SPDX-License-Identifier: Apache-2.0
// Work in a device's context, and driver errors as a call's.
#ifndef FLASHINFER_MSA_NATIVE_CONTEXT_H_
#define FLASHINFER_MSA_NATIVE_CONTEXT_H_

#include "call.h"
#include "driver.h"

namespace msa_icp {

// Makes a device's primary context, the one torch uses, current for a scope.
class ContextScope {
 public:
  ContextScope(const Driver* driver, CUcontext context) : driver_(driver) {
    CUcontext current = nullptr;
    pushed_ = driver->cuCtxGetCurrent(&current) != kCudaSuccess || current != context;
    if (pushed_) driver->cuCtxPushCurrent(context);
  }
  ~ContextScope() {
    CUcontext popped;
    if (pushed_) driver_->cuCtxPopCurrent(&popped);
  }

 private:
  const Driver* driver_;
  bool pushed_;
};

// The driver; null with the call failed where there is none.
const Driver* require_driver(Call& call);

// Whether the driver did `what`; if not, the call has failed.
bool check(Call& call, const Driver* driver, CUresult result, const char* what);

}  // namespace msa_icp

#endif  // FLASHINFER_MSA_NATIVE_CONTEXT_H_
