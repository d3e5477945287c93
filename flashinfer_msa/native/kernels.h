// SPDX-License-Identifier: Apache-2.0
// The kernels loaded on each device, and launching them.
#ifndef FLASHINFER_MSA_NATIVE_KERNELS_H_
#define FLASHINFER_MSA_NATIVE_KERNELS_H_

#include <stdint.h>

#include "call.h"
#include "driver.h"
#include "params.h"
#include "roles.h"

namespace msa_icp {

constexpr int kMaxDevices = 64;
constexpr int kMaxLayouts = 16;
constexpr int kCommon = 0;  // layout index of kernels that no layout specialises

// A layout's numbers, as flashinfer_msa/layout.py tells them.
struct LayoutInfo {
  int page_size, world_size, rows, page_bytes, index_scale;
  char name[32];
};

// Index of the layout of a page size and world size, or 0 where there is none.
int find_layout(int page_size, int world_size);
const LayoutInfo& layout_info(int index);

struct Kernel {
  CUfunction function;
  unsigned threads;
  unsigned shared_bytes;
};

struct Device {
  CUcontext context;
  FaultRecord* fault;  // host address
  FaultRecord* fault_on_device;
  int multiprocessors;
  int capability_major;
  bool ready;  // every kernel is loaded
  Kernel kernels[kMaxLayouts][kNumRoles];
};

// A kernel's parameters.
struct Params {
  void* data;
  unsigned bytes;

  Params() = default;
  explicit Params(void* data_, unsigned bytes_) : data(data_), bytes(bytes_) {}
  template <typename T>
  explicit Params(T* params) : data(params), bytes(sizeof(T)) {}
};

// One kernel of a chain, ready to launch.
struct Launch {
  int layout;
  int role;
  unsigned grid_x, grid_y;
  Params params;
  bool dependent;  // programmatic dependent launch on the kernel before it
};

// The device of `call`, with its kernels loaded (by the Python loader at first use); null with the call failed
// otherwise. Its fault record and multiprocessor count go into parameters and grids.
Device* ready_device(Call& call);

// Describes a tensor of bytes to the tensor copy engine: `sizes` and `box` from the innermost dimension outwards,
// `strides` those of all but the innermost, tiles swizzled by 128 bytes.
bool make_tensor_map(Call& call, TensorMap* map, const void* address, int dimensions, const uint64_t* sizes,
                     const uint64_t* strides, const uint32_t* box);

// Launches the chain on torch's current stream of the call's device, in order.
void launch(Call& call, Device* device, Launch* chain, int count);

}  // namespace msa_icp

#endif  // FLASHINFER_MSA_NATIVE_KERNELS_H_
