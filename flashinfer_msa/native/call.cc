// SPDX-License-Identifier: Apache-2.0
// Argument checks, and the words for what is wrong.
#include "call.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

namespace msa_icp {
namespace {

struct TypeInfo {
  const char* name;
  uint8_t code, bits;
};

const TypeInfo& info(Type type) {
  static const TypeInfo infos[] = {{"torch.float8_e4m3fn", kDLFloat8_e4m3fn, 8},
                                   {"torch.float32", kDLFloat, 32},
                                   {"torch.int32", kDLInt, 32},
                                   {"torch.int64", kDLInt, 64},
                                   {"torch.uint8", kDLUInt, 8}};
  return infos[static_cast<int>(type)];
}

// A short text built bit by bit; what does not fit is cut.
struct Text {
  char chars[256] = "";
  int length = 0;

  __attribute__((format(printf, 2, 3))) Text& add(const char* format, ...) {
    va_list values;
    va_start(values, format);
    const int room = static_cast<int>(sizeof(chars)) - length;
    const int wrote = vsnprintf(chars + length, room, format, values);
    va_end(values);
    length += wrote < room ? wrote : room - 1;
    return *this;
  }

  Text& add_list(const int64_t* values, int count) {
    add("[");
    for (int i = 0; i < count; ++i) add("%s%" PRId64, i ? ", " : "", values[i]);
    return add("]");
  }
};

Text describe_type(DLDataType type) {
  Text text;
  const char* name = nullptr;
  switch (type.code) {
    case kDLInt: name = "int"; break;
    case kDLUInt: name = "uint"; break;
    case kDLFloat: name = "float"; break;
    case kDLBfloat: name = "bfloat"; break;
    case kDLComplex: name = "complex"; break;
    case kDLBool: return text.add("torch.bool");
    case kDLFloat8_e4m3fn: return text.add("torch.float8_e4m3fn");
    case kDLFloat8_e4m3fnuz: return text.add("torch.float8_e4m3fnuz");
    case kDLFloat8_e5m2: return text.add("torch.float8_e5m2");
    case kDLFloat8_e5m2fnuz: return text.add("torch.float8_e5m2fnuz");
    case kDLFloat8_e8m0fnu: return text.add("torch.float8_e8m0fnu");
    default: return text.add("of DLPack type %d with %d bits", type.code, type.bits);
  }
  return text.add("torch.%s%d", name, type.bits);
}

Text describe_device(DLDevice device) {
  Text text;
  if (device.device_type == kDLCPU) return text.add("cpu");
  if (device.device_type == kDLCUDA) return text.add("cuda:%d", device.device_id);
  return text.add("DLPack device type %d, index %d", device.device_type, device.device_id);
}

// What an argument that is not what it should be is.
Text describe(const TVMFFIAny& argument) {
  Text text;
  switch (argument.type_index) {
    case kTVMFFINone: return text.add("None");
    case kTVMFFIBool: return text.add(argument.v_int64 ? "True" : "False");
    case kTVMFFIInt: return text.add("%" PRId64, argument.v_int64);
    case kTVMFFIFloat: return text.add("the float %g", argument.v_float64);
    // The caller passes words in place of a tensor that cannot be passed.
    case kTVMFFIRawStr: return text.add("'%s'", argument.v_c_str);
    case kTVMFFISmallStr: return text.add("'%.*s'", static_cast<int>(argument.small_str_len), argument.v_bytes);
    case kTVMFFIStr: {
      const TVMFFIByteArray* bytes = TVMFFIBytesGetByteArrayPtr(argument.v_obj);
      return text.add("'%.*s'", static_cast<int>(bytes->size), bytes->data);
    }
    case kTVMFFIDLTensorPtr:
    case kTVMFFITensor: return text.add("a tensor");
    case kTVMFFIArray: return text.add("a list or tuple");
    case kTVMFFIMap: return text.add("a dict");
    case kTVMFFIDataType: return text.add("a dtype");
    case kTVMFFIDevice: return text.add("a device");
    default: return text.add("an object of another type, or an int beyond 64 bits");
  }
}

const DLTensor* tensor_of(const TVMFFIAny& argument) {
  if (argument.type_index == kTVMFFIDLTensorPtr) return static_cast<const DLTensor*>(argument.v_ptr);
  if (argument.type_index == kTVMFFITensor) return TVMFFITensorGetDLTensorPtr(argument.v_obj);
  return nullptr;
}

int64_t contiguous_stride(const DLTensor* t, int axis) {
  int64_t stride = 1;
  for (int k = t->ndim - 1; k > axis; --k) stride *= t->shape[k];
  return stride;
}

bool is_empty(const DLTensor* t) {
  for (int k = 0; k < t->ndim; ++k) {
    if (t->shape[k] == 0) return true;
  }
  return false;
}

Text describe_strides(const DLTensor* t) {
  Text text;
  if (t->strides == nullptr) return text.add("contiguous");
  return text.add_list(t->strides, t->ndim);
}

}  // namespace

void set_result(TVMFFIAny* result, int64_t value) {
  memset(result, 0, sizeof(*result));
  result->type_index = kTVMFFIInt;
  result->v_int64 = value;
}

int64_t Tensor::stride(int axis) const { return dl->strides ? dl->strides[axis] : contiguous_stride(dl, axis); }

const TVMFFIAny* Call::take(const char* name) {
  if (next_ == end_) {
    fail_as("TypeError", "%s is missing", name);
    return nullptr;
  }
  const TVMFFIAny* argument = next_++;
  return failed_ ? nullptr : argument;
}

bool Call::flag(const char* name) {
  const TVMFFIAny* argument = take(name);
  if (argument == nullptr) return false;
  if (argument->type_index != kTVMFFIBool) {
    fail("%s must be True or False, was %s", name, describe(*argument).chars);
    return false;
  }
  return argument->v_int64 != 0;
}

int64_t Call::integer(const char* name, int64_t low, int64_t high) {
  const TVMFFIAny* argument = take(name);
  if (argument == nullptr) return 0;
  if (argument->type_index != kTVMFFIInt) {
    fail("%s must be an integer, was %s", name, describe(*argument).chars);
    return 0;
  }
  expect_between(name, argument->v_int64, low, high);
  return failed_ ? 0 : argument->v_int64;
}

int64_t Call::one_of(const char* name, int64_t first, int64_t second) {
  const int64_t value = integer(name, INT64_MIN, INT64_MAX);
  if (!failed_ && value != first && value != second) {
    fail("%s must be %" PRId64 " or %" PRId64 ", was %" PRId64, name, first, second, value);
  }
  return value;
}

void Call::expect_between(const char* name, int64_t value, int64_t low, int64_t high) {
  if (failed_ || (value >= low && value <= high)) return;
  fail("%s must be in [%" PRId64 ", %" PRId64 "], was %" PRId64, name, low, high, value);
}

void Call::expect_given(const Tensor& t) {
  if (!failed_ && !t) fail("%s must be a dense tensor, was None", t.name);
}

double Call::finite_number(const char* name) {
  const TVMFFIAny* argument = take(name);
  if (argument == nullptr) return 0;
  const bool is_float = argument->type_index == kTVMFFIFloat;
  const double value = is_float ? argument->v_float64 : static_cast<double>(argument->v_int64);
  if ((!is_float && argument->type_index != kTVMFFIInt) || !__builtin_isfinite(value)) {
    fail("%s must be a finite number, was %s", name, describe(*argument).chars);
    return 0;
  }
  return value;
}

Tensor Call::tensor(const char* name, Type type, int dimensions) {
  const TVMFFIAny* argument = take(name);
  if (argument == nullptr) return Tensor{name, nullptr};
  return check_tensor(name, argument, type, dimensions);
}

Tensor Call::optional_tensor(const char* name, Type type, int dimensions) {
  const TVMFFIAny* argument = take(name);
  if (argument == nullptr || argument->type_index == kTVMFFINone) return Tensor{name, nullptr};
  return check_tensor(name, argument, type, dimensions);
}

bool Call::at_tensor() const { return next_ != end_ && tensor_of(*next_) != nullptr; }

TVMFFIByteArray Call::text(const char* name) {
  const TVMFFIAny* argument = take(name);
  if (argument == nullptr) return {"", 0};
  switch (argument->type_index) {
    case kTVMFFIRawStr: return {argument->v_c_str, strlen(argument->v_c_str)};
    case kTVMFFIByteArrayPtr: return *static_cast<const TVMFFIByteArray*>(argument->v_ptr);
    case kTVMFFISmallStr:
    case kTVMFFISmallBytes: return {argument->v_bytes, static_cast<size_t>(argument->small_str_len)};
    case kTVMFFIStr:
    case kTVMFFIBytes: return *TVMFFIBytesGetByteArrayPtr(argument->v_obj);
    default: fail("%s must be a text, was %s", name, describe(*argument).chars); return {"", 0};
  }
}

void* Call::host_memory(const char* name, int64_t words) {
  const TVMFFIAny* argument = take(name);
  const DLTensor* t = argument ? tensor_of(*argument) : nullptr;
  if (t == nullptr || t->device.device_type != kDLCPU || t->ndim != 1 || t->shape[0] != words) {
    fail("%s must be %" PRId64 " words in host memory", name, words);
    return nullptr;
  }
  return static_cast<char*>(t->data) + t->byte_offset;
}

void Call::expect_device(int64_t index, const char* whose) {
  device_ = {index < 0 ? kDLCPU : kDLCUDA, index < 0 ? 0 : static_cast<int32_t>(index)};
  device_of_ = whose;
}

Tensor Call::check_tensor(const char* name, const TVMFFIAny* argument, Type type, int dimensions) {
  const DLTensor* t = tensor_of(*argument);
  const Tensor none{name, nullptr};
  if (t == nullptr) {
    fail("%s must be a dense tensor, was %s", name, describe(*argument).chars);
    return none;
  }
  if (require_cuda_ && t->device.device_type != kDLCUDA) {
    fail("%s must be on a CUDA device, was on %s", name, describe_device(t->device).chars);
    return none;
  }
  if (device_of_ == nullptr) {
    device_ = t->device;
    device_of_ = name;
  } else if (t->device.device_type != device_.device_type || t->device.device_id != device_.device_id) {
    fail("%s must be on %s like %s, was on %s", name, describe_device(device_).chars, device_of_,
         describe_device(t->device).chars);
    return none;
  }
  const TypeInfo& want = info(type);
  if (t->dtype.code != want.code || t->dtype.bits != want.bits || t->dtype.lanes != 1) {
    fail("%s must be %s, was %s", name, want.name, describe_type(t->dtype).chars);
    return none;
  }
  if (t->ndim != dimensions) {
    fail("%s must have %d dimensions, had shape %s", name, dimensions, Text().add_list(t->shape, t->ndim).chars);
    return none;
  }
  const Tensor checked{name, t};
  if (!is_empty(t) && t->data == nullptr) {
    fail("%s must be a tensor with memory, had none", name);
    return none;
  }
  expect_aligned(checked, want.bits / 8);
  return failed_ ? none : checked;
}

void Call::expect_shape(const Tensor& t, const char* shape, const int64_t* sizes) {
  if (failed_ || !t) return;
  for (int k = 0; k < t.dl->ndim; ++k) {
    if (sizes[k] < 0 || t.size(k) == sizes[k]) continue;
    Text want;
    want.add("[");
    for (int i = 0; i < t.dl->ndim; ++i) {
      if (i) want.add(", ");
      sizes[i] < 0 ? want.add("*") : want.add("%" PRId64, sizes[i]);
    }
    fail("%s must have shape %s] = %s], was %s", t.name, shape, want.chars,
         Text().add_list(t.dl->shape, t.dl->ndim).chars);
    return;
  }
}

void Call::expect_size(const Tensor& t, int axis, int64_t low, int64_t high, const char* why) {
  if (failed_ || !t || (t.size(axis) >= low && t.size(axis) <= high)) return;
  Text range;
  if (high == INT64_MAX) {
    range.add("at least %" PRId64, low);
  } else {
    range.add("between %" PRId64 " and %" PRId64, low, high);
  }
  fail("%s must have %s elements in dimension %d (%s), had shape %s", t.name, range.chars, axis, why,
       Text().add_list(t.dl->shape, t.dl->ndim).chars);
}

void Call::expect_contiguous(const Tensor& t) {
  if (failed_ || !t || is_empty(t.dl)) return;
  for (int k = 0; k < t.dl->ndim; ++k) {
    if (t.size(k) == 1 || t.stride(k) == contiguous_stride(t.dl, k)) continue;
    fail("%s must be contiguous, had shape %s and strides %s", t.name, Text().add_list(t.dl->shape, t.dl->ndim).chars,
         describe_strides(t.dl).chars);
    return;
  }
}

void Call::expect_unit_last_stride(const Tensor& t) {
  if (failed_ || !t || is_empty(t.dl)) return;
  const int last = t.dl->ndim - 1;
  if (t.size(last) == 1 || t.stride(last) == 1) return;
  fail("%s must have stride 1 in its last dimension, had shape %s and strides %s", t.name,
       Text().add_list(t.dl->shape, t.dl->ndim).chars, describe_strides(t.dl).chars);
}

void Call::expect_stride(const Tensor& t, int axis, int64_t low, const char* why) {
  if (failed_ || !t || is_empty(t.dl) || t.size(axis) == 1 || t.stride(axis) >= low) return;
  fail("%s must have a stride of at least %" PRId64 " in dimension %d (%s), had shape %s and strides %s", t.name, low,
       axis, why, Text().add_list(t.dl->shape, t.dl->ndim).chars, describe_strides(t.dl).chars);
}

void Call::expect_disjoint_rows(const Tensor& t) {
  if (failed_ || !t || is_empty(t.dl)) return;
  const int last = t.dl->ndim - 1;
  int64_t extent = t.size(last);
  uint64_t taken = 0;
  // Dimensions by ascending stride: each must step over all that the ones before span.
  while (true) {
    int next = -1;
    for (int k = 0; k < last; ++k) {
      if (t.size(k) > 1 && !(taken >> k & 1) && (next < 0 || t.stride(k) < t.stride(next))) next = k;
    }
    if (next < 0) return;
    taken |= uint64_t{1} << next;
    int64_t span;
    if (t.stride(next) < extent || __builtin_mul_overflow(t.stride(next), t.size(next) - 1, &span) ||
        __builtin_add_overflow(span, extent, &extent)) {
      fail("%s must have rows that do not overlap, had shape %s and strides %s", t.name,
           Text().add_list(t.dl->shape, t.dl->ndim).chars, describe_strides(t.dl).chars);
      return;
    }
  }
}

void Call::expect_multiple(const Tensor& t, int axis, int64_t divisor) {
  if (failed_ || !t || is_empty(t.dl) || t.size(axis) == 1 || t.stride(axis) % divisor == 0) return;
  fail("%s must have a stride that is a multiple of %" PRId64 " in dimension %d, had shape %s and strides %s", t.name,
       divisor, axis, Text().add_list(t.dl->shape, t.dl->ndim).chars, describe_strides(t.dl).chars);
}

void Call::expect_aligned(const Tensor& t, int bytes) {
  if (failed_ || !t || is_empty(t.dl)) return;
  const uint64_t address = reinterpret_cast<uint64_t>(t.data<char>());
  if (address % bytes == 0) return;
  fail("%s must start at an address aligned to %d bytes, was at 0x%" PRIx64, t.name, bytes, address);
}

void Call::set_error(const char* kind, const char* format, va_list values) {
  if (failed_) return;
  failed_ = true;
  kind_ = kind;
  vsnprintf(message_, sizeof(message_), format, values);
}

void Call::fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  set_error("ValueError", format, values);
  va_end(values);
}

void Call::fail_as(const char* kind, const char* format, ...) {
  va_list values;
  va_start(values, format);
  set_error(kind, format, values);
  va_end(values);
}

int Call::finish() {
  if (!failed_) return 0;
  if (!raised_) TVMFFIErrorSetRaisedFromCStr(kind_, message_);
  return -1;
}

}  // namespace msa_icp
