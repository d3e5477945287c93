// Copies from global to shared memory by cp.async (before sm_90). Every lane of the warp copies its share.
// Needs: ptx/mbarrier.cuh.j2.
namespace ptx {

constexpr unsigned kCopyArrivals = 32;

// Copies kBytes, whose arrival completes `barrier`'s phase. The warp must be converged.
template <int kBytes>
__device__ __forceinline__ void copy_to_shared(void* to, const void* from, unsigned long long* barrier, int lane) {
  static_assert(kBytes % (32 * 16) == 0, "every lane copies 16 bytes at a time");
#pragma unroll
  for (int offset = 0; offset < kBytes; offset += 32 * 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to) + offset + lane * 16),
                 "l"(static_cast<const char*>(from) + offset + lane * 16)
                 : "memory");
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// These copies write through the generic proxy, like any store, so __syncwarp orders them after reads.
__device__ __forceinline__ void fence_reads_before_copy() {}

}  // namespace ptx
