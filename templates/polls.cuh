// How long a wait for a peer goes on.
// Needs: ptx/system_scope.cuh.
inline namespace kernels {

// How often and how long a wait has polled.
struct Polls {
  unsigned count = 0;
  unsigned long long since = 0;

  // Counts a poll in vain; whether the wait gives up. The clock is read so rarely that polling is no slower for it.
  template <typename Params>
  __device__ __forceinline__ bool exhausts(const Params& p) {
    constexpr unsigned kPollsPerReading = 256;
    ++count;
    if (count == kPollsPerReading) since = ptx::nanoseconds();
    if (p.wait_ns == 0) return count == static_cast<unsigned>(p.spin_limit);
    return count % kPollsPerReading == 0 && ptx::nanoseconds() - since >= static_cast<unsigned long long>(p.wait_ns);
  }

  __device__ __forceinline__ int milliseconds() const {
    return since == 0 ? 0 : static_cast<int>((ptx::nanoseconds() - since) / 1000000);
  }
};

}  // namespace kernels
