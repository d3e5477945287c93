// What a wait for a peer does when it gives up: count it, record it, end the context.
// Needs: params.h, polls.cuh, ptx/system_scope.cuh.

namespace msa_icp {

__device__ unsigned fault_claimed;
__device__ unsigned fault_recorded;

}  // namespace msa_icp

inline namespace kernels {

// `rank` and `slot` are -1 where the kernel does not know them. Does not return.
__device__ __forceinline__ void fail_wait(msa_icp::FaultRecord* record, int* errors, msa_icp::Wait wait,
                                          msa_icp::RowKind row_kind, int rank, int slot, int peer, int head, int row,
                                          const Polls& polls) {
  if (atomicExch(&msa_icp::fault_claimed, 1u) == 0) {
    ptx::add_relaxed(errors, 1);
    volatile msa_icp::FaultRecord* out = record;
    out->wait = static_cast<int>(wait);
    out->row_kind = static_cast<int>(row_kind);
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
