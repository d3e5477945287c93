// The owner's merge: the W candidate rows of one (token, owned head) into its global Top16, by one warp.
namespace {

constexpr int kMaxWorldSize = {{ world_sizes | max }};
constexpr int kMaxCandidates = kMaxWorldSize * kTopK;
constexpr int kCandidatesPerLane = kMaxCandidates / 32;
constexpr int kEntryBits = 7;
static_assert(kMaxWorldSize % 2 == 0 && kMaxCandidates <= 1 << kEntryBits, "two rows fill a warp");

enum class Source { kLegacy, kTagged, kExchanged };

struct Merge {
  Key key[kMaxCandidates];
  int winner[kTopK];
};

__device__ __forceinline__ void fail_merge(const msa_icp::MergeParams& p, msa_icp::RowForm form, int source, int head,
                                           int token, int polls) {
  fail_wait(p.fault, p.errors, msa_icp::Wait::kMerge, form, p.rank, p.slot, source, head, token, polls);
}

// words[w] = word `lane` of rank w's row, once it is there.
template <Source kSource>
__device__ __forceinline__ void receive(const msa_icp::MergeParams& p, int token, int head, int lane,
                                        int (&words)[kMaxWorldSize]) {
  const long long first = head * p.recv_head_stride + token * p.recv_row_stride;
  if (kSource == Source::kTagged) {
    // Each word says which generation it belongs to, so a lane waits for its own words alone and nothing is ordered:
    // relaxed loads, at system scope because a peer stores them.
    int* counter = p.expected_generations + static_cast<long long>(head) * p.capacity + token;
    const unsigned expected = static_cast<unsigned>(*counter) + 1;
    const unsigned long long* rows = static_cast<const unsigned long long*>(p.recv) + first;
#pragma unroll
    for (int w = 0; w < kMaxWorldSize; ++w) {
      if (w >= p.world_size) break;
      unsigned long long word = ptx::load_relaxed(rows + w * p.recv_source_stride + lane);
      for (int polls = 1; static_cast<unsigned>(word >> 32) != expected; ++polls) {
        if (polls == p.spin_limit) fail_merge(p, msa_icp::RowForm::kTagged, w, head, token, polls);
        word = ptx::load_relaxed(rows + w * p.recv_source_stride + lane);
      }
      words[w] = static_cast<int>(word);
    }
    __syncwarp();  // every lane has read the counter
    if (lane == 0) *counter = static_cast<int>(expected);
  } else {
    const int* rows = static_cast<const int*>(p.recv) + first;
    if (kSource == Source::kLegacy && lane < p.world_size) {
      // Acquire: pairs with the publisher's release of 1, before which all 32 words were stored.
      const int* flag = rows + lane * p.recv_source_stride + kRowWords - 1;
      for (int polls = 0; ptx::load_acquire(flag) != 1;) {
        if (++polls == p.spin_limit) fail_merge(p, msa_icp::RowForm::kLegacy, lane, head, token, polls);
      }
    }
    __syncwarp();  // orders the other lanes' loads after the acquires
#pragma unroll
    for (int w = 0; w < kMaxWorldSize; ++w) {
      if (w < p.world_size) words[w] = rows[w * p.recv_source_stride + lane];
    }
  }
}

// Lets the publishers fill the rows again.
__device__ __forceinline__ void clear_flags(const msa_icp::MergeParams& p, int token, int head, int lane) {
  __syncwarp();  // every lane has read its words
  if (lane < p.world_size) {
    int* row = static_cast<int*>(p.recv) + head * p.recv_head_stride + token * p.recv_row_stride;
    // Release: the reads above, of all lanes, come before a publisher that acquires the 0 stores anew.
    ptx::store_release(row + lane * p.recv_source_stride + kRowWords - 1, 0);
  }
}

template <Source kSource>
__device__ __forceinline__ void merge(const msa_icp::MergeParams& p) {
  __shared__ Merge shared;
  const int lane = threadIdx.x;
  const int token = blockIdx.x / p.heads_per_rank, head = blockIdx.x % p.heads_per_rank;
  ptx::wait_for_predecessor();
  ptx::allow_successor();

  int words[kMaxWorldSize] = {};
  receive<kSource>(p, token, head, lane, words);
  if (kSource == Source::kLegacy) clear_flags(p, token, head, lane);

  // Two rows make 32 candidates, one a lane: the lower lanes hold a row's scores and its upper lanes the ids.
  const int num_valid = p.num_valid_pages[token];
  const int limit = min(num_valid, kMaxBlocks);
  const int candidates = p.world_size * kTopK;
  Key mine[kCandidatesPerLane];
#pragma unroll
  for (int i = 0; i < kCandidatesPerLane; ++i) {
    const int partner = __shfl_xor_sync(kFullWarp, lane < kTopK ? words[2 * i + 1] : words[2 * i], kTopK);
    const int score_bits = lane < kTopK ? words[2 * i] : partner;
    const int id = lane < kTopK ? partner : words[2 * i + 1];
    const int entry = i * 32 + lane;
    const bool forced = id < p.init_blocks || id >= static_cast<long long>(num_valid) - p.local_blocks;
    const bool valid = entry < candidates && id >= 0 && id < limit;
    // The entry number tells duplicates of one id and score apart.
    mine[i] = valid ? candidate_key(score_bits, id, forced) << kEntryBits | static_cast<Key>(entry) : kNoCandidate;
    shared.key[entry] = mine[i];
  }
  if (lane < kTopK) shared.winner[lane] = -1;
  __syncwarp();

  // Of candidates with one id, only the largest stays.
  bool dropped[kCandidatesPerLane] = {};
#pragma unroll 8
  for (int e = 0; e < candidates; ++e) {
    const Key other = shared.key[e];
#pragma unroll
    for (int i = 0; i < kCandidatesPerLane; ++i) {
      dropped[i] |= other > mine[i] && id_of(other >> kEntryBits) == id_of(mine[i] >> kEntryBits);
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kCandidatesPerLane; ++i) {
    if (dropped[i]) shared.key[i * 32 + lane] = mine[i] = kNoCandidate;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kCandidatesPerLane; ++i) {
    if (mine[i] == kNoCandidate) continue;
    const int rank = count_larger(shared.key, candidates, mine[i]);
    if (rank < kTopK) shared.winner[rank] = id_of(mine[i] >> kEntryBits);
  }
  __syncwarp();

  int id = lane < kTopK ? shared.winner[lane] : -1;
  if (kSource == Source::kExchanged && num_valid == 0 && lane == 0) id = 0;
  int place = id < 0 ? lane : 0;  // ranks are dense, so empty places are the last ones already
  for (int i = 0; i < kTopK; ++i) {
    const int other = shared.winner[i];
    if (id >= 0) place += other >= 0 && other < id;
  }
  if (lane < kTopK) p.output[token * p.output_token_stride + head * p.output_head_stride + place] = id;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32)
    msa_icp_merge_legacy(const __grid_constant__ msa_icp::MergeParams params) {
  merge<Source::kLegacy>(params);
}

extern "C" __global__ void __launch_bounds__(32)
    msa_icp_merge_tagged(const __grid_constant__ msa_icp::MergeParams params) {
  merge<Source::kTagged>(params);
}

extern "C" __global__ void __launch_bounds__(32)
    msa_icp_merge_exchanged(const __grid_constant__ msa_icp::MergeParams params) {
  merge<Source::kExchanged>(params);
}
