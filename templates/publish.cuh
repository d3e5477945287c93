// Publication of a selected row into the receive row of the head's owner, by the first warp of a CTA.
inline namespace kernels {

template <msa_icp::RowKind kRowKind>
struct Publication {
  const msa_icp::PublishParams& p;
  int token, owner, owned;  // the head is the owner's number `owned`
  long long base;           // of the owner's receive rows
  long long row;            // that is written, of the owner's
  int* counter;             // of tagged rows
  unsigned generation;      // that the row gets

  // Loads what publishing needs, ahead of its use at the end.
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

  // Between this and the constructor lies a barrier of the CTA.
  __device__ __forceinline__ void store(const Selected& selected, int lane) const {
    if (kRowKind == msa_icp::RowKind::kTagged) {
      // A word carries its generation, so each validates itself: no order among the stores, and none with others, is
      // needed. Relaxed system-scope 64-bit stores are enough, as they cannot tear.
      unsigned long long* to = reinterpret_cast<unsigned long long*>(base) + row * kTaggedWords;
      const unsigned long long tag = static_cast<unsigned long long>(generation) << 32;
      if (lane < kTopK) {
        ptx::store_relaxed(to + selected.place, tag | static_cast<unsigned>(selected.bits));
        ptx::store_relaxed(to + kTopK + selected.place, tag | static_cast<unsigned>(selected.id));
      }
      if (lane == 0) *counter = static_cast<int>(generation);  // every thread read it before the barrier
    } else {
      int* to = reinterpret_cast<int*>(base) + row * kRowWords;
      int* flag = to + kRowWords - 1;
      if (lane == 0) {
        // Acquire: pairs with the owner's release of 0, after which none of its lanes reads the old words again.
        for (Polls polls; ptx::load_acquire(flag) != 0;) {
          if (polls.exhausts(p)) {
            fail_wait(p.fault, p.errors, msa_icp::Wait::kPublish, kRowKind, p.rank, p.slot, owner, owned, token, polls);
          }
        }
      }
      __syncwarp();  // orders the other lanes' stores after lane 0's acquire
      if (lane < kTopK) {
        to[selected.place] = selected.bits;
        to[kTopK + selected.place] = selected.id;
      }
      __syncwarp();  // orders the lanes' stores before lane 0's release, which is cumulative over them
      if (lane == 0) ptx::store_release(flag, 1);
    }
  }
};

}  // namespace kernels
