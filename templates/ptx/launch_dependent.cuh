// Programmatic dependent launch (sm_90 and later). Both functions do nothing in a kernel launched without it.
namespace ptx {

// Waits until every kernel that this one depends on has completed and its writes are visible.
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the dependent kernel start once every CTA has called this. Its own wait still lasts until this kernel completes.
__device__ __forceinline__ void allow_successor() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace ptx
