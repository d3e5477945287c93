// Global to shared copies by the bulk copy engine (sm_90 and later). One lane issues a whole copy.
namespace ptx {

constexpr unsigned kCopyArrivals = 1;

// Makes initialised barriers visible to the copy engine, which writes them through the async proxy.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Called by a converged warp: copies kBytes from global to shared memory and completes `barrier`'s phase with them.
template <int kBytes>
__device__ __forceinline__ void copy_to_shared(void* to, const void* from, unsigned long long* barrier, int lane) {
  static_assert(kBytes % 16 == 0, "bulk copies move multiples of 16 bytes");
  if (lane == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(kBytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(kBytes), "r"(shared_address(barrier))
                 : "memory");
  }
}

}  // namespace ptx
