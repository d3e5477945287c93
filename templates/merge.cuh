// The owner's merge: the W candidate rows of one (token, owned head) into its global Top16.
//
// A CTA takes a row of the output with a thread a candidate, a warp to every two ranks. Candidates find their places by
// counting: first the duplicates of an id drop out, then each survivor counts those that rank earlier.
namespace {

constexpr int kEntryBits = 7;

enum class Source { kLegacy, kTagged, kExchanged };

template <int kCandidates>
struct Merge {
  static_assert(kCandidates % 32 == 0 && kCandidates <= 1 << kEntryBits, "two ranks fill a warp");
  Key key[kCandidates];
  Key survivor[kCandidates];
  int winner[kTopK];
};

__device__ __forceinline__ void fail_merge(const msa_icp::MergeParams& p, msa_icp::RowForm form, int source, int head,
                                           int token, int polls) {
  fail_wait(p.fault, p.errors, msa_icp::Wait::kMerge, form, p.rank, p.slot, source, head, token, polls);
}

// words[i] = word `lane` of the row of rank `source + i`, once it is there.
template <Source kSource>
__device__ __forceinline__ void receive(const msa_icp::MergeParams& p, int source, int token, int head, int lane,
                                        int (&words)[2]) {
  const long long first = source * p.recv_source_stride + head * p.recv_head_stride + token * p.recv_row_stride;
  if (kSource == Source::kTagged) {
    // Each word says which generation it belongs to, so a lane waits for its own words alone and nothing is ordered:
    // relaxed loads, at system scope because a peer stores them.
    const unsigned long long* rows = static_cast<const unsigned long long*>(p.recv) + first + lane;
    unsigned long long word[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) word[i] = ptx::load_relaxed(rows + i * p.recv_source_stride);
    const unsigned expected =
        static_cast<unsigned>(p.expected_generations[static_cast<long long>(head) * p.capacity + token]) + 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      for (int polls = 1; static_cast<unsigned>(word[i] >> 32) != expected; ++polls) {
        if (polls == p.spin_limit) fail_merge(p, msa_icp::RowForm::kTagged, source + i, head, token, polls);
        word[i] = ptx::load_relaxed(rows + i * p.recv_source_stride);
      }
      words[i] = static_cast<int>(word[i]);
    }
  } else {
    const int* rows = static_cast<const int*>(p.recv) + first;
    if (kSource == Source::kLegacy && lane < 2) {
      // Acquire: pairs with the publisher's release of 1, before which all 32 words were stored.
      const int* flag = rows + lane * p.recv_source_stride + kRowWords - 1;
      for (int polls = 0; ptx::load_acquire(flag) != 1;) {
        if (++polls == p.spin_limit) fail_merge(p, msa_icp::RowForm::kLegacy, source + lane, head, token, polls);
      }
    }
    __syncwarp();  // orders the other lanes' loads after the acquires
#pragma unroll
    for (int i = 0; i < 2; ++i) words[i] = rows[i * p.recv_source_stride + lane];
  }
}

// Lets the publishers fill the two rows again.
__device__ __forceinline__ void clear_flags(const msa_icp::MergeParams& p, int source, int token, int head, int lane) {
  __syncwarp();  // every lane has read its words
  if (lane < 2) {
    int* row = static_cast<int*>(p.recv) + head * p.recv_head_stride + token * p.recv_row_stride;
    // Release: the reads above, of all lanes, come before a publisher that acquires the 0 stores anew.
    ptx::store_release(row + (source + lane) * p.recv_source_stride + kRowWords - 1, 0);
  }
}

template <Source kSource, int kWorldSize>
__device__ __forceinline__ void merge(const msa_icp::MergeParams& p) {
  constexpr int kCandidates = kWorldSize * kTopK;
  __shared__ Merge<kCandidates> shared;
  const int entry = threadIdx.x, lane = entry % 32, source = entry / 32 * 2;
  const int token = blockIdx.x / p.heads_per_rank, head = blockIdx.x % p.heads_per_rank;
  ptx::wait_for_predecessor();
  ptx::allow_successor();

  const int num_valid = p.num_valid_pages[token];
  int words[2];
  receive<kSource>(p, source, token, head, lane, words);
  if (kSource == Source::kLegacy) clear_flags(p, source, token, head, lane);

  // Two rows make 32 candidates, one a lane: the lower lanes hold a row's scores and its upper lanes the ids.
  const int partner = __shfl_xor_sync(kFullWarp, lane < kTopK ? words[1] : words[0], kTopK);
  const int score_bits = lane < kTopK ? words[0] : partner;
  const int id = lane < kTopK ? partner : words[1];
  const bool forced = id < p.init_blocks || id >= static_cast<long long>(num_valid) - p.local_blocks;
  const bool valid = id >= 0 && id < min(num_valid, kMaxBlocks);
  // The entry number tells duplicates of one id and score apart.
  const Key key =
      valid ? candidate_key(__int_as_float(score_bits), id, forced) << kEntryBits | static_cast<Key>(entry) : kNoCandidate;
  shared.key[entry] = key;
  if (entry < kTopK) shared.winner[entry] = -1;
  __syncthreads();
  if (kSource == Source::kTagged && entry == 0) {
    // Every thread has read the counter.
    ++p.expected_generations[static_cast<long long>(head) * p.capacity + token];
  }

  // Of candidates with one id, only the largest stays.
  bool dropped = !valid;
#pragma unroll 16
  for (int e = 0; e < kCandidates; ++e) {
    const Key other = shared.key[e];
    dropped |= other > key && (static_cast<unsigned>(other ^ key) >> kEntryBits & (kMaxBlocks - 1)) == 0;
  }
  shared.survivor[entry] = dropped ? kNoCandidate : key;
  __syncthreads();
  if (!dropped) {
    const int rank = count_larger(shared.survivor, kCandidates, key);
    if (rank < kTopK) shared.winner[rank] = id;
  }
  __syncthreads();

  if (entry >= kTopK) return;
  int chosen = shared.winner[entry];
  if (kSource == Source::kExchanged && num_valid == 0 && entry == 0) chosen = 0;
  int place = chosen < 0 ? entry : 0;  // ranks are dense, so empty places are the last ones already
#pragma unroll
  for (int i = 0; i < kTopK; ++i) {
    const int other = shared.winner[i];
    if (chosen >= 0) place += other >= 0 && other < chosen;
  }
  p.output[token * p.output_token_stride + head * p.output_head_stride + place] = chosen;
}

}  // namespace

{% for world_size in world_sizes %}
{% for source in ["legacy", "tagged", "exchanged"] %}
extern "C" __global__ void __launch_bounds__({{ world_size * TOP_K }})
    msa_icp_merge_{{ source }}_{{ world_size }}(const __grid_constant__ msa_icp::MergeParams params) {
  merge<Source::k{{ source | capitalize }}, {{ world_size }}>(params);
}

{% endfor %}
{% endfor %}
