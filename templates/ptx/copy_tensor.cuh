// Copies of tensor tiles from global to shared memory by the tensor copy engine (sm_90 and later). One lane issues a
// whole tile.
// Needs: ptx/mbarrier.cuh.j2.
namespace ptx {

__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies the tile at element (x, y) of a 2-D tensor; `barrier` counts its bytes. Elements outside the tensor are zero.
__device__ __forceinline__ void copy_tile(void* to, const void* map, int x, int y, unsigned long long* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, { %2, %3}], [%4];" ::"r"(
          shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier))
      : "memory");
}

// The same for a 3-D tensor.
__device__ __forceinline__ void copy_tile(void* to, const void* map, int x, int y, int z,
                                          unsigned long long* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, { %2, %3, %4}], "
      "[%5];" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}

}  // namespace ptx
