// Order between threads' own accesses and those of tensor cores and copy engines (sm_90 and later).
namespace ptx {

// Orders the calling thread's earlier reads and writes of shared memory before accesses of the async proxy that come
// after it by a barrier or in program order.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace ptx
