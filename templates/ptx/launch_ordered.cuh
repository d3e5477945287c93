// Architectures without programmatic dependent launch: kernels of a stream follow one another.
namespace ptx {

__device__ __forceinline__ void wait_for_predecessor() {}
__device__ __forceinline__ void allow_successor() {}

}  // namespace ptx
