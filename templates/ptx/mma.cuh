// The tensor-core product of FP16 tiles with FP32 accumulation, and the exact conversion of e4m3 to FP16.
namespace ptx {

// Converts the two e4m3 in the low or high half of `word` to two FP16. Every e4m3 value is an FP16 value.
__device__ __forceinline__ unsigned half2_from_e4m3_low(unsigned word) {
  unsigned result;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}\n"
      : "=r"(result)
      : "r"(word));
  return result;
}

__device__ __forceinline__ unsigned half2_from_e4m3_high(unsigned word) {
  unsigned result;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}\n"
      : "=r"(result)
      : "r"(word));
  return result;
}

// d[16 x 8] = a[16 x 16] * b[16 x 8], plus d where kAdd. With g = lane / 4 and t = lane % 4: a0, a2 are row g and a1,
// a3 row g + 8; a0, a1 and b0 are k = 2t, 2t + 1; a2, a3 and b1 the same plus 8; b is column g; d0, d1 are row g and
// d2, d3 row g + 8 at columns 2t, 2t + 1.
template <bool kAdd>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                             unsigned b0, unsigned b1) {
  if (!kAdd) d[0] = d[1] = d[2] = d[3] = 0.0f;
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, "
      "{ %10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]));
}

}  // namespace ptx
