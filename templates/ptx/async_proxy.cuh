// Order between ordinary accesses and those of tensor cores and copy engines (sm_90 and later).
namespace ptx {

// Makes the calling thread's writes to shared memory visible to the async proxy, once others know of them.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace ptx
