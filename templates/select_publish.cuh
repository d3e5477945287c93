// Decode selection: the Top16 candidates of one (token, head) row, published into the receive row of the head's owner.
//
// A CTA takes a row. Thread i holds the columns i, i + 256, ...; the 32 residues of the column modulo 32 are 32
// disjoint groups, so the 16th largest of the groups' maxima bounds the 16th largest key from below. The few keys at
// or above the bound are listed and ranked by counting. Should a row crowd its large keys into few groups, so that the
// list overflows, the keys are taken one by one instead.
namespace {

constexpr int kSelectThreads = 256;
constexpr int kSelectWarps = kSelectThreads / 32;
constexpr int kKeysPerThread = kMaxBlocks / kSelectThreads;
constexpr int kListCapacity = kSelectThreads;

struct Selection {
  Key group_max[kSelectWarps][32];
  Key list[kListCapacity];
  int list_bits[kListCapacity];
  Key winner[kTopK];
  int winner_bits[kTopK];
  Key warp_max[kSelectWarps];
  int count;
};

// This thread's candidates: raw score bits, and the keys they stand for.
struct Candidates {
  int bits[kKeysPerThread];
  const float* row;
  int columns;  // columns of the row that are candidates
  int scale, offset, force_begin;
  long long force_end;  // first id that the trailing forced blocks start at

  __device__ __forceinline__ void load(const msa_icp::SelectPublishParams& p, int token, int head) {
    const int num_valid = p.num_valid_pages[token];
    const int limit = min(num_valid, kMaxBlocks);
    scale = p.index_scale;
    offset = p.index_offset;
    force_begin = p.force_begin_blocks;
    force_end = static_cast<long long>(num_valid) - p.force_end_blocks;
    columns = min(limit > offset ? (limit - offset - 1) / scale + 1 : 0, p.score_columns);
    row = p.scores + token * p.score_token_stride + head * p.score_head_stride;
#pragma unroll
    for (int i = 0; i < kKeysPerThread; ++i) {
      const int column = column_of(i);
      bits[i] = column < columns ? __float_as_int(row[column]) : 0;
    }
  }

  __device__ __forceinline__ static int column_of(int i) { return i * kSelectThreads + static_cast<int>(threadIdx.x); }

  __device__ __forceinline__ Key key_of(int column, int score_bits) const {
    const int id = column * scale + offset;
    return candidate_key(score_bits, id, id < force_begin || id >= force_end);
  }

  __device__ __forceinline__ Key key(int i) const {
    return column_of(i) < columns ? key_of(column_of(i), bits[i]) : kNoCandidate;
  }
};

// The 16th largest of the 32 group maxima, or 1 (every candidate) where fewer than 16 groups have one.
__device__ __forceinline__ Key selection_bound(const Candidates& candidates, Selection& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Key largest = kNoCandidate;
#pragma unroll
  for (int i = 0; i < kKeysPerThread; ++i) {
    if (i * kSelectThreads >= candidates.columns) break;
    largest = max(largest, candidates.key(i));
  }
  shared.group_max[warp][lane] = largest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kSelectWarps; ++w) largest = max(largest, shared.group_max[w][lane]);
  __syncthreads();
  shared.group_max[warp][lane] = largest;
  __syncwarp();
  const int rank = count_larger(shared.group_max[warp], 32, largest);
  const unsigned holder = __ballot_sync(kFullWarp, largest != kNoCandidate && rank == kTopK - 1);
  const Key bound = __shfl_sync(kFullWarp, largest, holder ? __ffs(holder) - 1 : 0);
  return holder ? bound : 1;
}

// Exact whatever the values: the largest key below the one found before, 16 times. Rare, so the row is read again
// rather than held in registers.
__device__ __forceinline__ void select_one_by_one(const Candidates& candidates, Selection& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Key previous = ~static_cast<Key>(0);
  for (int place = 0; place < kTopK; ++place) {
    Key largest = kNoCandidate;
    int largest_bits = 0;
    for (int column = threadIdx.x; column < candidates.columns; column += kSelectThreads) {
      const int bits = __float_as_int(candidates.row[column]);
      const Key key = candidates.key_of(column, bits);
      if (key < previous && key > largest) {
        largest = key;
        largest_bits = bits;
      }
    }
    Key warp_largest = largest;
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      warp_largest = max(warp_largest, __shfl_xor_sync(kFullWarp, warp_largest, mask));
    }
    __syncthreads();
    if (lane == 0) shared.warp_max[warp] = warp_largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kSelectWarps; ++w) warp_largest = max(warp_largest, shared.warp_max[w]);
    if (largest == warp_largest && largest != kNoCandidate) {
      shared.winner[place] = largest;
      shared.winner_bits[place] = largest_bits;
    }
    previous = warp_largest;
  }
}

// Leaves the 16 best candidates in shared.winner; places without one hold kNoCandidate.
__device__ __forceinline__ void select(const Candidates& candidates, Selection& shared) {
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) shared.count = 0;
  if (threadIdx.x < kTopK) shared.winner[threadIdx.x] = kNoCandidate;
  const Key bound = selection_bound(candidates, shared);
#pragma unroll
  for (int i = 0; i < kKeysPerThread; ++i) {
    if (i * kSelectThreads >= candidates.columns) break;
    const Key key = candidates.key(i);
    const unsigned taken = __ballot_sync(kFullWarp, key >= bound);
    if (taken == 0) continue;
    int place = 0;
    if (lane == 0) place = atomicAdd(&shared.count, __popc(taken));
    place = __shfl_sync(kFullWarp, place, 0) + __popc(taken & ((1u << lane) - 1));
    if (key >= bound && place < kListCapacity) {
      shared.list[place] = key;
      shared.list_bits[place] = candidates.bits[i];
    }
  }
  __syncthreads();
  const int count = shared.count;
  if (count > kListCapacity) {
    select_one_by_one(candidates, shared);
  } else if (threadIdx.x < count) {
    const Key key = shared.list[threadIdx.x];
    const int rank = count_larger(shared.list, count, key);
    if (rank < kTopK) {
      shared.winner[rank] = key;
      shared.winner_bits[rank] = shared.list_bits[threadIdx.x];
    }
  }
  __syncthreads();
}

template <msa_icp::RowForm kForm>
__device__ __forceinline__ void select_publish(const msa_icp::SelectPublishParams& p) {
  __shared__ Selection shared;
  const int token = blockIdx.x / kHeads, head = blockIdx.x % kHeads;
  ptx::wait_for_predecessor();
  ptx::allow_successor();

  Candidates candidates;
  candidates.load(p, token, head);
  select(candidates, shared);
  if (threadIdx.x >= 32) return;

  // The winners in the order of their ids, then empty places.
  const int lane = threadIdx.x;
  const Key key = lane < kTopK ? shared.winner[lane] : kNoCandidate;
  const int id = key == kNoCandidate ? -1 : id_of(key);
  const int bits = key == kNoCandidate ? __float_as_int(kMinusInfinity) : shared.winner_bits[lane];
  int place = id < 0 ? lane : 0;  // ranks are dense, so empty places are the last ones already
#pragma unroll
  for (int i = 0; i < kTopK; ++i) {
    const int other = __shfl_sync(kFullWarp, id, i);
    place += other >= 0 && other < id;
  }

  const int owner = head / p.heads_per_rank, owned = head % p.heads_per_rank;
  const long long row =
      ((static_cast<long long>(p.slot) * p.world_size + p.rank) * p.heads_per_rank + owned) * p.capacity + token;
  if (kForm == msa_icp::RowForm::kTagged) {
    // A word carries its generation, so each validates itself: no order among the stores, and none with others, is
    // needed. Relaxed system-scope 64-bit stores are enough, as they cannot tear.
    int* counter = p.generations + (static_cast<long long>(p.slot) * kHeads + head) * p.capacity + token;
    const int generation = *counter + 1;
    unsigned long long* to = reinterpret_cast<unsigned long long*>(p.recv_bases[owner]) + row * kTaggedWords;
    const unsigned long long tag = static_cast<unsigned long long>(static_cast<unsigned>(generation)) << 32;
    if (lane < kTopK) {
      ptx::store_relaxed(to + place, tag | static_cast<unsigned>(bits));
      ptx::store_relaxed(to + kTopK + place, tag | static_cast<unsigned>(id));
    }
    __syncwarp();  // every lane has read the counter
    if (lane == 0) *counter = generation;
  } else {
    int* to = reinterpret_cast<int*>(p.recv_bases[owner]) + row * kRowWords;
    int* flag = to + kRowWords - 1;
    if (lane == 0) {
      // Acquire: pairs with the owner's release of 0, after which none of its lanes reads the old words again.
      for (int polls = 0; ptx::load_acquire(flag) != 0;) {
        if (++polls == p.spin_limit) {
          fail_wait(p.fault, p.errors, msa_icp::Wait::kPublish, kForm, p.rank, p.slot, owner, owned, token, polls);
        }
      }
    }
    __syncwarp();  // orders the other lanes' stores after lane 0's acquire
    if (lane < kTopK) {
      to[place] = bits;
      to[kTopK + place] = id;
    }
    __syncwarp();  // orders the lanes' stores before lane 0's release, which is cumulative over them
    if (lane == 0) ptx::store_release(flag, 1);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kSelectThreads, 4)
    msa_icp_select_publish_legacy(const __grid_constant__ msa_icp::SelectPublishParams params) {
  select_publish<msa_icp::RowForm::kLegacy>(params);
}

extern "C" __global__ void __launch_bounds__(kSelectThreads, 4)
    msa_icp_select_publish_tagged(const __grid_constant__ msa_icp::SelectPublishParams params) {
  select_publish<msa_icp::RowForm::kTagged>(params);
}
