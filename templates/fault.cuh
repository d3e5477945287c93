// How long a wait for a peer goes on, and what it does that gives up: count it, record it, end the context.
namespace msa_icp {

__device__ unsigned fault_claimed;
__device__ unsigned fault_recorded;

}  // namespace msa_icp

// Needs: params.h, ptx/system_scope.cuh.
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

// `rank` and `slot` are -1 where the kernel does not know them. Does not return.
__device__ __forceinline__ void fail_wait(msa_icp::FaultRecord* record, int* errors, msa_icp::Wait wait,
                                          msa_icp::RowForm form, int rank, int slot, int peer, int head, int row,
                                          const Polls& polls) {
  if (atomicExch(&msa_icp::fault_claimed, 1u) == 0) {
    ptx::add_relaxed(errors, 1);
    volatile msa_icp::FaultRecord* out = record;
    out->wait = static_cast<int>(wait);
    out->form = static_cast<int>(form);
    out->rank = rank;
    out->slot = slot;
    out->peer = peer;
    out->head = head;
    out->row = row;
    out->polls = static_cast<int>(min(polls.count, 0x7fffffffu));
    out->milliseconds = polls.milliseconds();
    ptx::fence();  // the host must see the fields before `complete`
    out->complete = 1;
    ptx::fence();  // and all of it before the context ends
    atomicExch(&msa_icp::fault_recorded, 1u);
  } else {
    // A trap here could end the context before the first fault is on record.
    for (int i = 0; i < (1 << 20) && atomicAdd(&msa_icp::fault_recorded, 0u) == 0; ++i) {
    }
  }
  __trap();
}

}  // namespace kernels
