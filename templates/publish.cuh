// Publishes a selected row into the receive row of the head's owner. The first warp of a CTA does it.
// Needs: params.h, constants.h.j2, polls.cuh, fault.cuh, score_row.cuh, ptx/system_scope.cuh.
inline namespace kernels {

template <msa_icp::RowKind kRowKind>
struct Publication {
  const msa_icp::PublishParams& p;
  int token, owner, owned;  // the head is number `owned` of the owner's heads
  long long base;           // address of the owner's receive rows
  long long row;            // index of the receive row to write
  int* counter;             // generation counter of a tagged row
  unsigned generation;      // of the new row

  // Loads what publishing needs before the selection, so that nothing waits for it at the end.
  __device__ __forceinline__ Publication(const msa_icp::PublishParams& params, int token_, int head)
      : p(params),
        token(token_),
        owner(p.heads_per_rank == 1 ? head : head / 2),
        owned(p.heads_per_rank == 1 ? 0 : head % 2),
        base(p.recv_bases[owner]),
        row(((static_cast<long long>(p.slot) * p.world_size + p.rank) * p.heads_per_rank + owned) * p.capacity + token),
        counter(nullptr),
        generation(0) {
    if (kRowKind == msa_icp::RowKind::kTagged) {
      counter = p.generations + (static_cast<long long>(p.slot) * kHeads + head) * p.capacity + token;
      generation = static_cast<unsigned>(*counter) + 1;
    }
  }

  // The CTA must pass a barrier between the constructor and this.
  __device__ __forceinline__ void store(const Selected& selected, int lane) const {
    if (kRowKind == msa_icp::RowKind::kTagged) {
      // A word carries its generation, so each validates itself: no order among the stores, and none with others, is
      // needed. Relaxed system-scope 64-bit stores are enough, as they cannot tear.
      unsigned long long* to = reinterpret_cast<unsigned long long*>(base) + row * kTaggedWords;
      const unsigned long long tag = static_cast<unsigned long long>(generation) << 32;
      if (lane < kTopK) {
        ptx::store_relaxed(to + selected.position, tag | static_cast<unsigned>(selected.bits));
        ptx::store_relaxed(to + kTopK + selected.position, tag | static_cast<unsigned>(selected.id));
      }
      if (lane == 0) *counter = static_cast<int>(generation);  // every thread read it before the barrier
    } else {
      int* to = reinterpret_cast<int*>(base) + row * kRowWords;
      int* flag = to + kRowWords - 1;
      if (lane == 0) {
        // Acquire: pairs with the owner's release of 0, which follows all of its reads of the old row.
        for (Polls polls; ptx::load_acquire(flag) != 0;) {
          if (polls.exhausts(p)) {
            fail_wait(p.fault, p.errors, msa_icp::Wait::kPublish, kRowKind, p.rank, p.slot, owner, owned, token, polls);
          }
        }
      }
      __syncwarp();  // orders the other lanes' stores after lane 0's acquire
      if (lane < kTopK) {
        to[selected.position] = selected.bits;
        to[kTopK + selected.position] = selected.id;
      }
      __syncwarp();  // orders the lanes' stores before lane 0's release, which is cumulative over them
      if (lane == 0) ptx::store_release(flag, 1);
    }
  }
};

}  // namespace kernels
