// For architectures without programmatic dependent launch: the kernels of a stream run one after the other.
namespace ptx {

__device__ __forceinline__ void wait_for_predecessor() {}
__device__ __forceinline__ void allow_successor() {}

}  // namespace ptx
