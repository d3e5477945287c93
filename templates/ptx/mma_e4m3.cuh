// The tensor-core product of e4m3 tiles with FP32 accumulation, where mma.sync multiplies e4m3 directly (sm_89,
// sm_120).
namespace ptx {

// d[16 x 8] += a[16 x 32] * b[32 x 8]; a register holds four elements, the first in the low byte. With g = lane / 4 and
// t = lane % 4: a0, a2 are row g and a1, a3 row g + 8; a0, a1 and b0 are k = 4t to 4t + 3; a2, a3 and b1 the same plus
// 16; b is column g; d0, d1 are row g and d2, d3 row g + 8 at columns 2t, 2t + 1.
__device__ __forceinline__ void mma_m16n8k32_e4m3(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                                  unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, "
      "{ %0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace ptx
