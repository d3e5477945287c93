// SPDX-License-Identifier: Apache-2.0
// A CTA on the CPU: what the portable prefill scorer needs of CUDA, with its threads as fibers that take turns.
//
// Warp operations are as PTX defines them, and copies are done at once. Sums of products are exact but for the rounding
// of one float, as no tensor core's are: what this shows is which elements meet, not how they add up.
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __align__(bytes)
#define __launch_bounds__(...)

struct Index {
  unsigned x;
};
struct float4 {
  float x, y, z, w;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct ulonglong2 {
  unsigned long long x, y;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}

template <typename To, typename From>
To bits_of(From value) {
  To result;
  static_assert(sizeof(result) == sizeof(value), "the same bits");
  memcpy(&result, &value, sizeof(result));
  return result;
}
inline int __float_as_int(float value) { return bits_of<int>(value); }
inline float __int_as_float(int value) { return bits_of<float>(value); }

inline namespace kernels {
alignas(128) unsigned char dynamic_shared[256 << 10];
}

namespace emulation {

constexpr int kMaxThreads = 1024;
constexpr int kStackBytes = 64 << 10;

// Threads that meet: those of a warp or of the CTA.
struct Meeting {
  int arrived = 0;
  unsigned count = 0;
};

// What a lane brings to an operation of its warp.
struct Operands {
  unsigned a[4], b[2];
  unsigned long long value;
};

Index thread_index, block_index;
ucontext_t scheduler, fibers[kMaxThreads];
bool done[kMaxThreads];
char (*stacks)[kStackBytes];
Meeting warps[kMaxThreads / 32], cta;
Operands operands[kMaxThreads];
int threads;
void (*body)();

inline void meet(Meeting& meeting, int size) {
  const unsigned count = meeting.count;
  const unsigned thread = thread_index.x;
  if (++meeting.arrived == size) {
    meeting.arrived = 0;
    ++meeting.count;
  }
  while (meeting.count == count) swapcontext(&fibers[thread], &scheduler);
}

// This lane's operands are those of its warp's operation until all lanes have called `end`.
inline Operands* begin() {
  meet(warps[thread_index.x / 32], 32);
  return &operands[thread_index.x / 32 * 32];
}
inline void end() { meet(warps[thread_index.x / 32], 32); }

inline void enter() {
  body();
  done[thread_index.x] = true;
}

// Runs the only CTA of so many threads, each of which calls `kernel`.
inline void run(void (*kernel)(), int num_threads) {
  threads = num_threads;
  body = kernel;
  if (stacks == nullptr) stacks = static_cast<char (*)[kStackBytes]>(malloc(sizeof(*stacks) * kMaxThreads));
  for (int i = 0; i < threads; ++i) {
    done[i] = false;
    getcontext(&fibers[i]);
    fibers[i].uc_stack.ss_sp = stacks[i];
    fibers[i].uc_stack.ss_size = kStackBytes;
    fibers[i].uc_link = &scheduler;
    makecontext(&fibers[i], enter, 0);
  }
  for (int running = threads; running > 0;) {
    for (int i = 0; i < threads; ++i) {
      if (done[i]) continue;
      thread_index.x = i;
      swapcontext(&scheduler, &fibers[i]);
      running -= done[i];
    }
  }
}

inline float value_of_e4m3(unsigned bits) {
  const unsigned exponent = bits >> 3 & 15, mantissa = bits & 7;
  if ((bits & 0x7f) == 0x7f) return nanf("");
  const float magnitude = exponent == 0 ? ldexpf(mantissa, -9) : ldexpf(8 + mantissa, static_cast<int>(exponent) - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

// The product of an operation of kDepth elements. A register of `a` or `b` holds kPack of them, a byte of e4m3 each.
template <int kDepth, int kPack>
void product(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  constexpr int kHalf = kDepth / 2;
  const int lane = thread_index.x % 32;
  memcpy(operands[thread_index.x].a, a, sizeof(a));
  memcpy(operands[thread_index.x].b, b, sizeof(b));
  const Operands* warp = begin();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double sum = d[i];
    for (int k = 0; k < kDepth; ++k) {
      const int quad_lane = k % kHalf / kPack, shift = k % kPack * 8;
      const unsigned left = warp[row % 8 * 4 + quad_lane].a[k / kHalf * 2 + row / 8] >> shift;
      const unsigned right = warp[column * 4 + quad_lane].b[k / kHalf] >> shift;
      sum += static_cast<double>(value_of_e4m3(left & 0xff)) * value_of_e4m3(right & 0xff);
    }
    d[i] = static_cast<float>(sum);
  }
  end();
}

template <typename T>
T value_of_lane(T value, int lane) {
  memcpy(&operands[thread_index.x].value, &value, sizeof(value));
  T result;
  memcpy(&result, &begin()[lane].value, sizeof(result));
  end();
  return result;
}

}  // namespace emulation

#define threadIdx emulation::thread_index
#define blockIdx emulation::block_index

inline void __syncthreads() { emulation::meet(emulation::cta, emulation::threads); }
inline void __syncwarp() { emulation::end(); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::value_of_lane(value, static_cast<int>(threadIdx.x % 32) ^ mask);
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulation::value_of_lane(value, lane);
}
inline bool __any_sync(unsigned, bool value) {
  bool result = false;
  emulation::operands[threadIdx.x].value = value;
  const emulation::Operands* warp = emulation::begin();
  for (int lane = 0; lane < 32; ++lane) result = result || warp[lane].value != 0;
  emulation::end();
  return result;
}
inline bool __all_sync(unsigned mask, bool value) { return !__any_sync(mask, !value); }
inline int __reduce_max_sync(unsigned, int value) {
  int result = value;
  emulation::operands[threadIdx.x].value = static_cast<unsigned>(value);
  const emulation::Operands* warp = emulation::begin();
  for (int lane = 0; lane < 32; ++lane) result = max(result, static_cast<int>(warp[lane].value));
  emulation::end();
  return result;
}

namespace ptx {

inline void wait_for_predecessor() {}
inline void allow_successor() {}
inline void copy_16(void* to, const void* from) { memcpy(to, from, 16); }
inline void copy_commit() {}
template <int kPending>
void copy_wait() {}

// Stay e4m3, of which FP16 has every value: two in the low bytes.
inline unsigned half2_from_e4m3_low(unsigned word) { return word & 0xffff; }
inline unsigned half2_from_e4m3_high(unsigned word) { return word >> 16; }

template <bool kAdd>
void mma_m16n8k16(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  static_assert(kAdd, "the scorer adds");
  emulation::product<16, 2>(d, {a0, a1, a2, a3}, {b0, b1});
}

inline void mma_m16n8k32_e4m3(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                              unsigned b1) {
  emulation::product<32, 4>(d, {a0, a1, a2, a3}, {b0, b1});
}

}  // namespace ptx
