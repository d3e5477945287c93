// Selection by a CTA: the Top16 candidates of one (token, head) row.
//
// Thread i holds the columns i, i + kThreads, ...; the 32 residues of the column modulo 32 are 32 disjoint groups, so
// the 16th largest of the groups' best scores bounds the 16th best score from below. The few candidates at or above the
// bound are listed and ranked by counting. Should a row crowd its large or equal scores into few groups, so that the
// list overflows, the candidates are taken one by one instead.
// Needs: params.h, constants.h.j2, rank_keys.cuh, score_row.cuh.
inline namespace kernels {

constexpr int kListCapacity = 256;
// Columns up to which all are listed: ranking them takes no longer than finding a bound.
constexpr int kFewColumns = 128;
static_assert(kFewColumns <= kListCapacity, "all fit the list");

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

// The score keys of this thread's candidates.
//
// A thread's first kAhead columns are loaded along with the number of pages rather than after it.
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

  // Of a candidate; the score of a forced one is read again.
  __device__ __forceinline__ Key full_key(int i) const {
    const int column = column_of(i);
    return key[i] == kForcedScore ? row.key(column)
                                  : candidate_key(key[i], (column << row.shift) + row.offset, false);
  }

  // Candidates at or above `bound`.
  __device__ __forceinline__ int count(ScoreKey bound) const {
    int result = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) result += key[i] >= bound;
    return result;
  }
};

// The 16th largest of the 32 groups' best scores, or 1 (every candidate) where fewer than 16 groups have one. Every
// warp finds it for itself, which costs less than a barrier.
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
  // Of the groups that fewer than 16 surpass, the least is the 16th.
  return max(__reduce_min_sync(kFullWarp, larger < kTopK ? best : kForcedScore), 1u);
}

// Leaves the 16 best candidates in shared.winner; places without one hold kNoCandidate.
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
    int place = candidates.count(bound);
    if (place > 0) {
      place = atomicAdd(&shared.count, place);
#pragma unroll
      for (int i = 0; i < Candidates::kCount; ++i) {
        if (candidates.key[i] < bound) continue;
        if (place < kListCapacity) shared.list[place] = candidates.full_key(i);
        ++place;
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
