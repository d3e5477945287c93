// SPDX-License-Identifier: Apache-2.0
// Finds the CUDA driver.
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>

namespace msa_icp {
namespace {

Driver table;
const char* failure;

template <typename Function>
bool resolve(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

void load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    failure = "libcuda.so.1 cannot be loaded: no NVIDIA driver is installed on this machine";
    return;
  }
  Driver& d = table;
  const bool complete = resolve(library, "cuInit", &d.cuInit) &&
                        resolve(library, "cuGetErrorString", &d.cuGetErrorString) &&
                        resolve(library, "cuDeviceGet", &d.cuDeviceGet) &&
                        resolve(library, "cuDeviceGetAttribute", &d.cuDeviceGetAttribute) &&
                        resolve(library, "cuDevicePrimaryCtxRetain", &d.cuDevicePrimaryCtxRetain) &&
                        resolve(library, "cuCtxGetCurrent", &d.cuCtxGetCurrent) &&
                        resolve(library, "cuCtxPushCurrent_v2", &d.cuCtxPushCurrent) &&
                        resolve(library, "cuCtxPopCurrent_v2", &d.cuCtxPopCurrent) &&
                        resolve(library, "cuCtxEnablePeerAccess", &d.cuCtxEnablePeerAccess) &&
                        resolve(library, "cuModuleLoadData", &d.cuModuleLoadData) &&
                        resolve(library, "cuModuleGetFunction", &d.cuModuleGetFunction) &&
                        resolve(library, "cuFuncSetAttribute", &d.cuFuncSetAttribute) &&
                        resolve(library, "cuLaunchKernelEx", &d.cuLaunchKernelEx) &&
                        resolve(library, "cuStreamIsCapturing", &d.cuStreamIsCapturing) &&
                        resolve(library, "cuMemcpyDtoDAsync_v2", &d.cuMemcpyDtoDAsync) &&
                        resolve(library, "cuGraphLaunch", &d.cuGraphLaunch) &&
                        resolve(library, "cuMemHostRegister_v2", &d.cuMemHostRegister) &&
                        resolve(library, "cuMemHostGetDevicePointer_v2", &d.cuMemHostGetDevicePointer) &&
                        resolve(library, "cuTensorMapEncodeTiled", &d.cuTensorMapEncodeTiled);
  if (!complete) {
    failure = "the NVIDIA driver is too old: a driver of CUDA 12.0 or later is needed";
    return;
  }
  resolve(library, "cuFuncLoad", &d.cuFuncLoad);
  if (d.cuInit(0) != kCudaSuccess) failure = "the NVIDIA driver finds no usable GPU (cuInit failed)";
}

}  // namespace

const Driver* driver(const char** why) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, load);
  if (failure != nullptr) {
    *why = failure;
    return nullptr;
  }
  return &table;
}

}  // namespace msa_icp
