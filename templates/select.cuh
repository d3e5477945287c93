// Selection by a CTA: the Top16 candidates of one (token, head) row.
//
// Thread i holds the columns i, i + kThreads, and so on. Columns that are equal modulo 32 form a group. The 16th
// largest of the 32 groups' best scores is a lower bound of the 16th best score. The few candidates at or above the
// bound are listed and ranked by counting. If large or equal scores crowd into few groups and the list overflows,
// candidates are selected one by one instead.
// Needs: params.h, constants.h.j2, rank_keys.cuh, score_row.cuh.
inline namespace kernels {

constexpr int kListCapacity = 256;
// A row of at most so many columns is listed whole: ranking all takes no longer than finding a bound.
constexpr int kFewColumns = 128;
static_assert(kFewColumns <= kListCapacity, "a short row fits the list");

template <int kThreads>
struct Selection {
  static constexpr int kWarps = kThreads / 32;
  ScoreKey group_best[kWarps][32];  // of a warp's columns
  ScoreKey row_best[kWarps][32];    // of all columns, a copy for each warp
  int count;
  Key list[kListCapacity];
  Key winner[kTopK];
  Key warp_best[kWarps];
};

// The score keys of this thread's candidates. It loads its first kAhead columns along with the number of pages, not
// after it.
template <int kThreads, int kPerThread, int kAhead>
struct Candidates {
  static constexpr int kCount = kPerThread;
  ScoreKey key[kPerThread];
  ScoreRow row;

  __device__ __forceinline__ static int column_of(int i) { return i * kThreads + static_cast<int>(threadIdx.x); }

  __device__ __forceinline__ Candidates(const msa_icp::SelectParams& p, int token, int head) : row(p, token, head) {
    float score[kPerThread];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) score[i] = column_of(i) < p.score_columns ? row.score[column_of(i)] : 0.0f;
    row.limit(p, p.num_valid_pages[token]);
#pragma unroll
    for (int i = kAhead; i < kPerThread; ++i) score[i] = column_of(i) < row.columns ? row.score[column_of(i)] : 0.0f;
    const unsigned free_columns = row.forced_from - row.forced_before;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const bool is_free = static_cast<unsigned>(column_of(i) - row.forced_before) < free_columns;
      key[i] = is_free ? score_key(score[i]) : column_of(i) < row.columns ? kForcedScore : 0;
    }
  }

  __device__ __forceinline__ ScoreKey best() const {
    ScoreKey result = key[0];
#pragma unroll
    for (int i = 1; i < kPerThread; ++i) result = max(result, key[i]);
    return result;
  }

  // The unique key of candidate `i`. The score of a forced candidate is read again.
  __device__ __forceinline__ Key full_key(int i) const {
    const int column = column_of(i);
    return key[i] == kForcedScore ? row.key(column)
                                  : candidate_key(key[i], (column << row.shift) + row.offset, false);
  }

  // How many candidates are at or above `bound`.
  __device__ __forceinline__ int count(ScoreKey bound) const {
    int result = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) result += key[i] >= bound;
    return result;
  }
};

// The 16th largest of the 32 groups' best scores, or 1 (every candidate passes) where fewer than 16 groups have a
// candidate. Every warp finds it by itself, which costs less than a barrier.
template <int kThreads, typename Candidates>
__device__ __forceinline__ ScoreKey score_bound(const Candidates& candidates, Selection<kThreads>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  ScoreKey best = candidates.best();
  shared.group_best[warp][lane] = best;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < Selection<kThreads>::kWarps; ++w) best = max(best, shared.group_best[w][lane]);
  shared.row_best[warp][lane] = best;
  __syncwarp();
  int larger = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) larger += shared.row_best[warp][i] > best;
  // The 16th is the least of the groups that fewer than 16 others surpass.
  return max(__reduce_min_sync(kFullWarp, larger < kTopK ? best : kForcedScore), 1u);
}

// Writes the 16 best candidates to shared.winner. Positions without a candidate hold kNoCandidate.
template <int kThreads, typename Candidates>
__device__ __forceinline__ void select(const Candidates& candidates, Selection<kThreads>& shared) {
  const int thread = threadIdx.x;
  if (thread == 0) shared.count = 0;
  if (thread < kTopK) shared.winner[thread] = kNoCandidate;
#pragma unroll
  for (int i = thread; i < kListCapacity; i += kThreads) shared.list[i] = kNoCandidate;
  int count = candidates.row.columns;
  if (count <= kFewColumns) {
    if (thread < count) shared.list[thread] = candidates.full_key(0);
    __syncthreads();
  } else {
    const ScoreKey bound = score_bound(candidates, shared);
    int position = candidates.count(bound);
    if (position > 0) {
      position = atomicAdd(&shared.count, position);
#pragma unroll
      for (int i = 0; i < Candidates::kCount; ++i) {
        if (candidates.key[i] < bound) continue;
        if (position < kListCapacity) shared.list[position] = candidates.full_key(i);
        ++position;
      }
    }
    __syncthreads();
    count = shared.count;
  }
  if (count > kListCapacity) {
    select_one_by_one<kThreads / 32>(candidates.row, shared, thread / 32, thread % 32);
  } else {
    for (int entry = thread; entry < count; entry += kThreads) {
      const Key key = shared.list[entry];
      const int rank = count_larger(shared.list, count, key);
      if (rank < kTopK) shared.winner[rank] = key;
    }
  }
  __syncthreads();
}

}  // namespace kernels
