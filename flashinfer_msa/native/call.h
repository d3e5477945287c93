// SPDX-License-Identifier: Apache-2.0
// One call from Python: its arguments, taken in order and checked, and the first thing wrong with them.
//
// A check that fails records its message and makes every later check of the call a no-op, so that an operation reads
// as a list of requirements and asks `ok()` once, before anything is launched.
#ifndef FLASHINFER_MSA_NATIVE_CALL_H_
#define FLASHINFER_MSA_NATIVE_CALL_H_

#include <stdint.h>
#include <tvm/ffi/c_api.h>

// Begins an operation, `__tvm_ffi_<its name>`.
#define MSA_EXPORT extern "C" __attribute__((visibility("default"))) int

namespace msa_icp {

struct LaunchRecord;

inline int as_int(int64_t value) { return static_cast<int>(value); }

// Makes an integer the result of an operation.
void set_result(TVMFFIAny* result, int64_t value);

enum class Type { kE4M3, kFloat32, kInt32, kInt64, kUInt8 };

// A tensor argument. Sizes and strides count elements; a dimension of one element has no stride to speak of.
struct Tensor {
  const char* name = "";
  const DLTensor* dl = nullptr;

  explicit operator bool() const { return dl != nullptr; }
  int64_t size(int axis) const { return dl->shape[axis]; }
  int64_t stride(int axis) const;
  template <typename T>
  T* data() const {
    return reinterpret_cast<T*>(static_cast<char*>(dl->data) + dl->byte_offset);
  }
};

class Call {
 public:
  Call(const TVMFFIAny* arguments, int count) : next_(arguments), end_(arguments + count) {}

  // Demands that tensors are on one CUDA device; else any one device will do.
  void require_cuda() { require_cuda_ = true; }

  // Take the next argument.
  bool flag(const char* name);
  int64_t integer(const char* name, int64_t low, int64_t high);
  int64_t one_of(const char* name, int64_t first, int64_t second);
  double finite_number(const char* name);
  Tensor tensor(const char* name, Type type, int dimensions);
  Tensor optional_tensor(const char* name, Type type, int dimensions);
  // A text; empty where the argument is none. It lives as long as the argument.
  TVMFFIByteArray text(const char* name);
  // Memory of a dense int64 tensor on the host, which the caller has made itself.
  template <typename T>
  T* host_struct(const char* name) {
    static_assert(sizeof(T) % sizeof(int64_t) == 0, "passed as int64 words");
    return static_cast<T*>(host_memory(name, sizeof(T) / sizeof(int64_t)));
  }
  // Whether the next argument is a tensor.
  bool at_tensor() const;

  // Demands that an optional tensor is given.
  void expect_given(const Tensor& t);
  // Demands that an integer taken before is in a range that other arguments decide.
  void expect_between(const char* name, int64_t value, int64_t low, int64_t high);

  // Demands that the tensors that follow are on this CUDA device, or with -1 on the CPU, as `whose` is.
  void expect_device(int64_t index, const char* whose);

  // Requirements on a tensor taken before. `shape` says in words what `sizes` (-1: any) should be.
  void expect_shape(const Tensor& t, const char* shape, const int64_t* sizes);
  template <typename... Sizes>
  void expect_shape(const Tensor& t, const char* shape, Sizes... sizes) {
    const int64_t list[] = {static_cast<int64_t>(sizes)...};
    expect_shape(t, shape, list);
  }
  void expect_size(const Tensor& t, int axis, int64_t low, int64_t high, const char* why);
  void expect_contiguous(const Tensor& t);
  void expect_unit_last_stride(const Tensor& t);
  // `t.stride(axis)` must be at least `low` wherever the dimension has more than one element.
  void expect_stride(const Tensor& t, int axis, int64_t low, const char* why);
  // Rows, in the last dimension, must not overlap, whatever the order of the other dimensions.
  void expect_disjoint_rows(const Tensor& t);
  void expect_multiple(const Tensor& t, int axis, int64_t divisor);
  void expect_aligned(const Tensor& t, int bytes);

  // Where the operation's chain is recorded rather than launched, if it is.
  void record_into(LaunchRecord* record) { record_ = record; }
  LaunchRecord* record() const { return record_; }

  // Records the call's first error as a ValueError; `format` starts with the argument's name.
  __attribute__((format(printf, 2, 3))) void fail(const char* format, ...);
  // The same with another kind of exception.
  __attribute__((format(printf, 3, 4))) void fail_as(const char* kind, const char* format, ...);
  // Takes the error that a Python callback has raised as the call's own.
  void fail_from_callback() { failed_ = raised_ = true; }

  bool ok() const { return !failed_; }
  // Device of the tensors taken so far.
  DLDevice device() const { return device_; }
  // What the operation returns to tvm-ffi; raises the recorded error.
  int finish();

 private:
  const TVMFFIAny* take(const char* name);
  void* host_memory(const char* name, int64_t words);
  Tensor check_tensor(const char* name, const TVMFFIAny* argument, Type type, int dimensions);
  void set_error(const char* kind, const char* format, __builtin_va_list values);

  const TVMFFIAny* next_;
  const TVMFFIAny* end_;
  bool require_cuda_ = false;
  bool failed_ = false;
  bool raised_ = false;
  DLDevice device_ = {static_cast<DLDeviceType>(0), 0};
  const char* device_of_ = nullptr;
  LaunchRecord* record_ = nullptr;
  const char* kind_ = "ValueError";
  char message_[1024];
};

}  // namespace msa_icp

#endif  // FLASHINFER_MSA_NATIVE_CALL_H_
