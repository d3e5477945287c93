// SPDX-License-Identifier: Apache-2.0
// Device table: contexts, cubins, kernels, fault records; and the operations the Python loader fills it with.
#include "kernels.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <tvm/ffi/extra/c_env_api.h>

#include "context.h"
#include "schema.h"

namespace msa_icp {
namespace {

Device devices[kMaxDevices];
LayoutInfo layouts[kMaxLayouts];
int num_layouts = 1;  // 0 is kCommon
TVMFFIObjectHandle loader;
FaultRecord* fault_records;  // one a device, in memory that outlives every context
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

bool map_fault_records(Call& call, const Driver* driver) {
  if (fault_records != nullptr) return true;
  const size_t bytes = kMaxDevices * sizeof(FaultRecord);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    call.fail_as("RuntimeError", "no memory for the fault records");
    return false;
  }
  if (!check(call, driver, driver->cuMemHostRegister(memory, bytes, kHostRegisterPortable | kHostRegisterDeviceMap),
             "mapping the fault records")) {
    munmap(memory, bytes);
    return false;
  }
  fault_records = static_cast<FaultRecord*>(memory);
  return true;
}

// The device's primary context and fault record, made at first use. Call with the lock held.
Device* open_device(Call& call, const Driver* driver, int index) {
  Device& device = devices[index];
  if (device.context != nullptr) return &device;
  CUdevice handle;
  CUcontext context;
  if (!check(call, driver, driver->cuDeviceGet(&handle, index), "finding the device") ||
      !check(call, driver, driver->cuDeviceGetAttribute(&device.multiprocessors, kAttributeMultiprocessorCount, handle),
             "reading the multiprocessor count") ||
      !check(call, driver,
             driver->cuDeviceGetAttribute(&device.capability_major, kAttributeComputeCapabilityMajor, handle),
             "reading the compute capability") ||
      !check(call, driver, driver->cuDevicePrimaryCtxRetain(&context, handle), "retaining the primary context")) {
    return nullptr;
  }
  ContextScope scope(driver, context);
  CUdeviceptr mapped;
  if (!map_fault_records(call, driver) ||
      !check(call, driver, driver->cuMemHostGetDevicePointer(&mapped, &fault_records[index], 0),
             "mapping the fault record")) {
    return nullptr;
  }
  device.fault = &fault_records[index];
  device.fault_on_device = reinterpret_cast<FaultRecord*>(mapped);
  device.context = context;
  return &device;
}

bool is_complete(const FaultRecord* fault) {
  return fault != nullptr && static_cast<const volatile FaultRecord*>(fault)->complete != 0;
}

// Index of a text among `count` names, or -1.
int find_name(const char* const* names, int count, const TVMFFIByteArray& text) {
  for (int i = 0; i < count; ++i) {
    if (strlen(names[i]) == text.size && memcmp(names[i], text.data, text.size) == 0) return i;
  }
  return -1;
}

CUresult launch_one(const Driver* driver, const Device* device, CUstream stream, const Launch& l) {
  const Kernel& kernel = device->kernels[l.layout][l.role];
  CUlaunchAttribute attribute = {};
  attribute.id = kLaunchProgrammaticSerialization;
  attribute.value.programmatic_serialization_allowed = 1;
  const CUlaunchConfig config = {l.grid_x,
                                 l.grid_y,
                                 1,
                                 kernel.threads,
                                 1,
                                 1,
                                 kernel.shared_bytes,
                                 stream,
                                 &attribute,
                                 l.dependent && device->capability_major >= 9 ? 1u : 0u};
  void* params[] = {l.params.data};
  return driver->cuLaunchKernelEx(&config, kernel.function, params, nullptr);
}

}  // namespace

int find_layout(int page_size, int world_size) {
  for (int i = 1; i < num_layouts; ++i) {
    if (layouts[i].page_size == page_size && layouts[i].world_size == world_size) return i;
  }
  return 0;
}

const LayoutInfo& layout_info(int index) { return layouts[index]; }

Device* ready_device(Call& call) {
  const int index = call.device().device_id;
  if (index >= kMaxDevices) {
    call.fail("device must have an index below %d, was cuda:%d", kMaxDevices, index);
    return nullptr;
  }
  Device& device = devices[index];
  if (is_complete(device.fault)) {
    // The caller of this library finds the record and puts it in words.
    call.fail_as("RuntimeError", "an earlier wait on cuda:%d ran out", index);
    return nullptr;
  }
  if (__atomic_load_n(&device.ready, __ATOMIC_ACQUIRE)) return &device;
  const Driver* driver = require_driver(call);
  if (driver == nullptr) return nullptr;
  int capturing = 0;
  // An error means that another stream is captured in a way that this one's work would break.
  const CUresult status = driver->cuStreamIsCapturing(TVMFFIEnvGetStream(kDLCUDA, index), &capturing);
  // A thread without a context captures nothing.
  if ((status != kCudaSuccess && status != kCudaInvalidContext) || capturing != 0) {
    call.fail_as("RuntimeError",
                 "a CUDA graph is being captured on cuda:%d, and the kernels are not resident there yet: call the "
                 "indexer's warmup() before the capture begins",
                 index);
    return nullptr;
  }
  TVMFFIAny argument, result;
  set_result(&argument, index);
  memset(&result, 0, sizeof(result));
  if (loader == nullptr || TVMFFIFunctionCall(loader, &argument, 1, &result) != 0) {
    loader == nullptr ? call.fail_as("RuntimeError", "no loader is set") : call.fail_from_callback();
    return nullptr;
  }
  return &device;
}

bool make_tensor_map(Call& call, TensorMap* map, const void* address, int dimensions, const uint64_t* sizes,
                     const uint64_t* strides, const uint32_t* box) {
  const Driver* d = require_driver(call);
  if (d == nullptr) return false;
  const uint32_t dense[] = {1, 1, 1};
  return check(call, d,
               d->cuTensorMapEncodeTiled(map, kTensorMapUInt8, static_cast<uint32_t>(dimensions), address, sizes,
                                         strides, box, dense, 0, kTensorMapSwizzle128B, kTensorMapPromotion128B, 0),
               "describing a tensor to the copy engine");
}

void launch(Call& call, Device* device, Launch* chain, int count) {
  const char* why;
  const Driver* d = driver(&why);
  for (int i = 0; i < count; ++i) {
    if (device->kernels[chain[i].layout][chain[i].role].function == nullptr) {
      call.fail_as("NotImplementedError", "the cubins installed for cuda:%d have no kernel for %s%s%s",
                   call.device().device_id, kRoleNames[chain[i].role], chain[i].layout ? " of layout " : "",
                   layouts[chain[i].layout].name);
      return;
    }
  }
  ContextScope scope(d, device->context);
  CUstream stream = TVMFFIEnvGetStream(kDLCUDA, call.device().device_id);
  for (int i = 0; i < count; ++i) {
    if (!check(call, d, launch_one(d, device, stream, chain[i]), kRoleNames[chain[i].role])) return;
  }
}

// bare_launches(device, count) -> nanoseconds that the driver takes for so many launches of a kernel that does nothing,
// on torch's current stream: what the host time of a chain is held against.
MSA_EXPORT __tvm_ffi_bare_launches(void*, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {
  Call call(args, num_args);
  const int index = as_int(call.integer("device", 0, kMaxDevices - 1));
  const int count = as_int(call.integer("count", 1, 1000));
  if (!call.ok()) return call.finish();
  call.expect_device(index, "the device");
  const Device* device = ready_device(call);
  if (device == nullptr) return call.finish();
  const Driver* d = require_driver(call);
  ContextScope scope(d, device->context);
  CUstream stream = TVMFFIEnvGetStream(kDLCUDA, index);
  PrefillFillParams none = {};
  const Launch fill = {kCommon, kPrefillFill, 1, 1, Params(&none), true};
  timespec begin, end;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  for (int i = 0; i < count; ++i) {
    if (!check(call, d, launch_one(d, device, stream, fill), kRoleNames[fill.role])) return call.finish();
  }
  clock_gettime(CLOCK_MONOTONIC, &end);
  set_result(result, (end.tv_sec - begin.tv_sec) * int64_t{1000000000} + end.tv_nsec - begin.tv_nsec);
  return call.finish();
}

// add_layout(name, page_size, world_size, rows, page_bytes, index_scale)
MSA_EXPORT __tvm_ffi_add_layout(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const TVMFFIByteArray name = call.text("name");
  LayoutInfo info = {};
  info.page_size = as_int(call.integer("page_size", 1, INT32_MAX));
  info.world_size = as_int(call.integer("world_size", 1, INT32_MAX));
  info.rows = as_int(call.integer("rows", 1, INT32_MAX));
  info.page_bytes = as_int(call.integer("page_bytes", 1, INT32_MAX));
  info.index_scale = as_int(call.integer("index_scale", 1, INT32_MAX));
  snprintf(info.name, sizeof(info.name), "%.*s", static_cast<int>(name.size), name.data);
  if (call.ok() && find_layout(info.page_size, info.world_size) == 0) {
    if (num_layouts == kMaxLayouts) {
      call.fail("at most %d layouts can be added", kMaxLayouts - 1);
    } else {
      layouts[num_layouts++] = info;
    }
  }
  return call.finish();
}

// set_loader(callable): called with a device index when a call finds no kernels on that device.
MSA_EXPORT __tvm_ffi_set_loader(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  if (count != 1 || args[0].type_index != kTVMFFIFunction) {
    call.fail("loader must be a function");
  } else {
    TVMFFIObjectIncRef(args[0].v_obj);
    if (loader != nullptr) TVMFFIObjectDecRef(loader);
    loader = args[0].v_obj;
  }
  return call.finish();
}

// load_cubin(device, image) -> module handle. The module stays loaded for the life of the process.
MSA_EXPORT __tvm_ffi_load_cubin(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  Call call(args, count);
  const int index = as_int(call.integer("device", 0, kMaxDevices - 1));
  const TVMFFIByteArray image = call.text("image");
  const Driver* driver = call.ok() ? require_driver(call) : nullptr;
  if (driver != nullptr) {
    pthread_mutex_lock(&lock);
    Device* device = open_device(call, driver, index);
    if (device != nullptr) {
      ContextScope scope(driver, device->context);
      CUmodule module;
      if (check(call, driver, driver->cuModuleLoadData(&module, image.data), "loading the cubin")) {
        set_result(result, static_cast<int64_t>(reinterpret_cast<intptr_t>(module)));
      }
    }
    pthread_mutex_unlock(&lock);
  }
  return call.finish();
}

// load_kernel(device, module, page_size, world_size, role, symbol, threads, shared_bytes): makes one kernel resident.
// A page size of 0 stands for kernels that no layout specialises.
MSA_EXPORT __tvm_ffi_load_kernel(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const int index = as_int(call.integer("device", 0, kMaxDevices - 1));
  const int64_t module = call.integer("module", INT64_MIN, INT64_MAX);
  const int page_size = as_int(call.integer("page_size", 0, INT32_MAX));
  const int world_size = as_int(call.integer("world_size", 0, INT32_MAX));
  const TVMFFIByteArray role_text = call.text("role"), symbol_text = call.text("symbol");
  const unsigned threads = static_cast<unsigned>(call.integer("threads", 1, 1024));
  const unsigned shared_bytes = static_cast<unsigned>(call.integer("shared_bytes", 0, INT32_MAX));
  const int layout = page_size ? find_layout(page_size, world_size) : kCommon;
  const int role = find_name(kRoleNames, kNumRoles, role_text);
  if (call.ok() && page_size && layout == 0) {
    call.fail("page_size and world_size must be a known layout's, were %d and %d", page_size, world_size);
  }
  if (call.ok() && role < 0) {
    call.fail("role must be one of the launcher's, was %.*s", static_cast<int>(role_text.size), role_text.data);
  }
  const Driver* driver = call.ok() ? require_driver(call) : nullptr;
  if (driver == nullptr) return call.finish();
  char symbol[128];
  snprintf(symbol, sizeof(symbol), "%.*s", static_cast<int>(symbol_text.size), symbol_text.data);
  pthread_mutex_lock(&lock);
  Device* device = open_device(call, driver, index);
  if (device != nullptr) {
    ContextScope scope(driver, device->context);
    CUfunction function;
    if (check(call, driver,
              driver->cuModuleGetFunction(&function, reinterpret_cast<CUmodule>(static_cast<intptr_t>(module)), symbol),
              symbol) &&
        // Setting an attribute loads the function too, on drivers that cannot be asked to.
        check(call, driver,
              driver->cuFuncSetAttribute(function, kFunctionMaxDynamicShared, static_cast<int>(shared_bytes)),
              "reserving shared memory") &&
        (driver->cuFuncLoad == nullptr ||
         check(call, driver, driver->cuFuncLoad(function), "making a kernel resident"))) {
      device->kernels[layout][role] = {function, threads, shared_bytes};
    }
  }
  pthread_mutex_unlock(&lock);
  return call.finish();
}

// mark_ready(device): every kernel of the device has been loaded.
MSA_EXPORT __tvm_ffi_mark_ready(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const int index = as_int(call.integer("device", 0, kMaxDevices - 1));
  if (call.ok()) __atomic_store_n(&devices[index].ready, true, __ATOMIC_RELEASE);
  return call.finish();
}

// enable_peer_access(device, peer): lets kernels on `device` store into `peer`'s memory.
MSA_EXPORT __tvm_ffi_enable_peer_access(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  const int index = as_int(call.integer("device", 0, kMaxDevices - 1));
  const int peer = as_int(call.integer("peer", 0, kMaxDevices - 1));
  const Driver* driver = call.ok() ? require_driver(call) : nullptr;
  if (driver != nullptr) {
    pthread_mutex_lock(&lock);
    Device* from = open_device(call, driver, index);
    Device* to = from ? open_device(call, driver, peer) : nullptr;
    if (to != nullptr) {
      ContextScope scope(driver, from->context);
      const CUresult status = driver->cuCtxEnablePeerAccess(to->context, 0);
      if (status != kCudaPeerAccessAlreadyEnabled) check(call, driver, status, "enabling peer access");
    }
    pthread_mutex_unlock(&lock);
  }
  return call.finish();
}

// fault_field(device, field) -> a field of the device's fault record by its name. Needs no driver.
MSA_EXPORT __tvm_ffi_fault_field(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  Call call(args, count);
  const int index = as_int(call.integer("device", 0, kMaxDevices - 1));
  const TVMFFIByteArray name = call.text("field");
  constexpr int kNumFields = sizeof(kFaultFields) / sizeof(kFaultFields[0]);
  const int field = call.ok() ? find_name(kFaultFields, kNumFields, name) : -1;
  if (call.ok() && field < 0) {
    call.fail("field must be one of the fault record's, was %.*s", static_cast<int>(name.size), name.data);
  }
  if (call.ok()) {
    const volatile int* words = reinterpret_cast<const volatile int*>(devices[index].fault);
    set_result(result, words ? words[field] : 0);
  }
  return call.finish();
}

// schema_digest() -> the digest of the schema that this launcher was compiled with, as text
MSA_EXPORT __tvm_ffi_schema_digest(void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  const TVMFFIByteArray text = {kSchemaDigest, sizeof(kSchemaDigest) - 1};
  return TVMFFIStringFromByteArray(&text, result);
}

}  // namespace msa_icp
