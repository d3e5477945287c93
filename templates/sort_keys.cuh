// Sorts keys that the lanes of a warp hold, one per lane.
// Needs: constants.h.j2, rank_keys.cuh.
inline namespace kernels {

// Sorts each group of kLanes lanes in descending order.
template <int kLanes>
__device__ __forceinline__ Key sort_keys(Key key, int lane) {
#pragma unroll
  for (int size = 2; size <= kLanes; size *= 2) {
#pragma unroll
    for (int mask = size / 2; mask > 0; mask /= 2) {
      const Key other = __shfl_xor_sync(kFullWarp, key, mask);
      const bool keeps_larger = ((lane & mask) == 0) == ((lane & size & kLanes - 1) == 0);
      key = keeps_larger == (other > key) ? other : key;
    }
  }
  return key;
}

// Merges two sorted lists into their 16 best, sorted, in each half of the warp. The larger keys of one list and the
// other's reverse are the 16 best. They form a bitonic sequence, so half-cleaners sort them.
__device__ __forceinline__ Key merge_lists(Key key, Key other, int lane) {
  key = max(key, __shfl_xor_sync(kFullWarp, other, kTopK - 1));
#pragma unroll
  for (int mask = kTopK / 2; mask > 0; mask /= 2) {
    const Key partner = __shfl_xor_sync(kFullWarp, key, mask);
    key = (lane & mask) == 0 ? max(key, partner) : min(key, partner);
  }
  return key;
}

}  // namespace kernels
