// Copies from global to shared memory by the bulk copy engine (sm_90 and later). One lane issues a whole copy.
// Needs: ptx/async_proxy.cuh, ptx/mbarrier.cuh.j2.
namespace ptx {

constexpr unsigned kCopyArrivals = 1;

// Copies kBytes, whose arrival completes `barrier`'s phase. The warp must be converged. The data is read once, so the
// L2 cache evicts it first.
template <int kBytes>
__device__ __forceinline__ void copy_to_shared(void* to, const void* from, unsigned long long* barrier, int lane) {
  static_assert(kBytes % 16 == 0, "bulk copies move multiples of 16 bytes");
  if (lane == 0) {
    mbarrier_arrive_expecting(barrier, kBytes);
    asm volatile(
        "{\n"
        ".reg .b64 policy;\n"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint\n"
        "    [%0], [%1], %2, [%3], policy;\n"
        "}\n" ::"r"(shared_address(to)),
        "l"(from), "r"(kBytes), "r"(shared_address(barrier))
        : "memory");
  }
}

// Each lane calls this between its reads of shared memory and the __syncwarp before a copy overwrites them.
__device__ __forceinline__ void fence_reads_before_copy() { fence_async_proxy(); }

}  // namespace ptx
