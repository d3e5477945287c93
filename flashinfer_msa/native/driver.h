// SPDX-License-Identifier: Apache-2.0
// The few CUDA driver calls the launcher makes, resolved from libcuda at first use.
//
// Declared here rather than included, so that the launcher builds without a toolkit, loads without a driver and is
// tied to no CUDA runtime. Names, values and structures are those of the driver's stable C ABI.
#ifndef FLASHINFER_MSA_NATIVE_DRIVER_H_
#define FLASHINFER_MSA_NATIVE_DRIVER_H_

#include <stddef.h>
#include <stdint.h>

namespace msa_icp {

using CUresult = int;
using CUdevice = int;
using CUcontext = void*;
using CUmodule = void*;
using CUfunction = void*;
using CUstream = void*;
using CUgraphExec = void*;
using CUdeviceptr = uint64_t;

constexpr CUresult kCudaSuccess = 0;
constexpr CUresult kCudaInvalidContext = 201;
constexpr CUresult kCudaPeerAccessAlreadyEnabled = 704;
constexpr int kAttributeMultiprocessorCount = 16, kAttributeComputeCapabilityMajor = 75;
constexpr int kFunctionMaxDynamicShared = 8;
constexpr unsigned kHostRegisterPortable = 1, kHostRegisterDeviceMap = 2;
constexpr int kTensorMapUInt8 = 0, kTensorMapSwizzle128B = 3, kTensorMapPromotion128B = 2;
constexpr unsigned kLaunchProgrammaticSerialization = 6;

struct CUlaunchAttribute {
  unsigned id;
  char padding[4];
  union {
    char bytes[64];
    int programmatic_serialization_allowed;
  } value;
};

struct CUlaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned num_attributes;
};

struct Driver {
  CUresult (*cuInit)(unsigned);
  CUresult (*cuGetErrorString)(CUresult, const char**);
  CUresult (*cuDeviceGet)(CUdevice*, int);
  CUresult (*cuDeviceGetAttribute)(int*, int, CUdevice);
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext*, CUdevice);
  CUresult (*cuCtxGetCurrent)(CUcontext*);
  CUresult (*cuCtxPushCurrent)(CUcontext);
  CUresult (*cuCtxPopCurrent)(CUcontext*);
  CUresult (*cuCtxEnablePeerAccess)(CUcontext, unsigned);
  CUresult (*cuModuleLoadData)(CUmodule*, const void*);
  CUresult (*cuModuleGetFunction)(CUfunction*, CUmodule, const char*);
  CUresult (*cuFuncSetAttribute)(CUfunction, int, int);
  CUresult (*cuFuncLoad)(CUfunction);  // CUDA 12.4 and later; null on older drivers
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig*, CUfunction, void**, void**);
  CUresult (*cuStreamIsCapturing)(CUstream, int*);
  CUresult (*cuMemcpyDtoDAsync)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
  CUresult (*cuGraphLaunch)(CUgraphExec, CUstream);
  CUresult (*cuMemHostRegister)(void*, size_t, unsigned);
  CUresult (*cuMemHostGetDevicePointer)(CUdeviceptr*, void*, unsigned);
  CUresult (*cuTensorMapEncodeTiled)(void* map, int type, uint32_t rank, const void* address, const uint64_t* sizes,
                                     const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                     int interleave, int swizzle, int l2_promotion, int fill);
};

// The driver, initialised; null with a reason in `*why` where there is none.
const Driver* driver(const char** why);

}  // namespace msa_icp

#endif  // FLASHINFER_MSA_NATIVE_DRIVER_H_
