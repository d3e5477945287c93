// Selection: the Top16 candidates of one (token, head) row.
//
// kThreads threads take a row: a whole CTA, or with 32 a warp. Thread i holds the columns i, i + kThreads, ...; the 32
// residues of the column modulo 32 are 32 disjoint groups, so the 16th largest of the groups' best scores bounds the
// 16th best score from below. The few candidates at or above the bound are listed and ranked by counting. Should a row
// crowd its large or equal scores into few groups, so that the list overflows, the candidates are taken one by one
// instead.
inline namespace kernels {

constexpr int kListCapacity = 256;
// Columns up to which all are listed: ranking them takes no longer than finding a bound.
constexpr int kFewColumns = 128;
static_assert(kFewColumns <= kListCapacity, "all fit the list");

// This thread among those that take the row.
template <int kThreads>
__device__ __forceinline__ int row_thread() {
  return kThreads == 32 ? threadIdx.x % 32 : threadIdx.x;
}

template <int kThreads>
__device__ __forceinline__ void row_sync() {
  if (kThreads == 32) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

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

// The score keys of this thread's candidates. Ids of a row are `(column << shift) + offset`; limits on ids become
// limits on columns, so that one comparison tells that a column is neither forced nor past the end.
//
// A thread's first kAhead columns are loaded along with the number of pages rather than after it.
template <int kThreads, int kPerThread, int kAhead>
struct Candidates {
  static constexpr int kCount = kPerThread;
  ScoreKey key[kPerThread];
  const float* row;
  int shift, offset;
  int columns;        // columns of the row that are candidates
  int forced_before;  // columns below this and from `forced_from` on are forced
  int forced_from;

  __device__ __forceinline__ static int column_of(int i) { return i * kThreads + row_thread<kThreads>(); }

  // Columns whose id is below `id`.
  __device__ __forceinline__ int columns_below(int id) const {
    return id > offset ? (id - offset - 1 >> shift) + 1 : 0;
  }

  __device__ __forceinline__ bool is_forced(int column) const {
    return column < forced_before || column >= forced_from;
  }

  __device__ __forceinline__ void load(const msa_icp::SelectParams& p, int token, int head) {
    row = p.scores + token * p.score_token_stride + head * p.score_head_stride;
    shift = p.index_scale - 1;  // the scale is 1 or 2
    offset = p.index_offset;
    float score[kPerThread];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) score[i] = column_of(i) < p.score_columns ? row[column_of(i)] : 0.0f;
    const int num_valid = p.num_valid_pages[token];
    columns = min(columns_below(min(num_valid, kMaxBlocks)), p.score_columns);
    forced_before = min(columns_below(p.force_begin_blocks), columns);
    forced_from = max(min(columns_below(max(max(num_valid, 0) - p.force_end_blocks, 0)), columns), forced_before);
#pragma unroll
    for (int i = kAhead; i < kPerThread; ++i) score[i] = column_of(i) < columns ? row[column_of(i)] : 0.0f;
    const unsigned free_columns = forced_from - forced_before;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const bool is_free = static_cast<unsigned>(column_of(i) - forced_before) < free_columns;
      key[i] = is_free ? score_key(score[i]) : column_of(i) < columns ? kForcedScore : 0;
    }
  }

  __device__ __forceinline__ ScoreKey best() const {
    ScoreKey result = key[0];
#pragma unroll
    for (int i = 1; i < kPerThread; ++i) result = max(result, key[i]);
    return result;
  }

  // Candidates at or above `bound`.
  __device__ __forceinline__ int count(ScoreKey bound) const {
    int result = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) result += key[i] >= bound;
    return result;
  }

  // `score` is the column's, or kForcedScore.
  __device__ __forceinline__ Key full_key(int column, ScoreKey score) const {
    const bool forced = is_forced(column);
    return candidate_key(forced ? score_key(row[column]) : score, (column << shift) + offset, forced);
  }
};

// The 16th largest of the 32 groups' best scores, or 1 (every candidate) where fewer than 16 groups have one. Every
// warp finds it for itself, which costs less than a barrier.
template <int kThreads, typename Candidates>
__device__ __forceinline__ ScoreKey score_bound(const Candidates& candidates, Selection<kThreads>& shared) {
  const int lane = threadIdx.x % 32, warp = row_thread<kThreads>() / 32;
  ScoreKey best = candidates.best();
  if (kThreads > 32) {
    shared.group_best[warp][lane] = best;
    row_sync<kThreads>();
#pragma unroll
    for (int w = 0; w < Selection<kThreads>::kWarps; ++w) best = max(best, shared.group_best[w][lane]);
  }
  shared.row_best[warp][lane] = best;
  __syncwarp();
  int larger = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) larger += shared.row_best[warp][i] > best;
  // Of the groups that fewer than 16 surpass, the least is the 16th.
  return max(__reduce_min_sync(kFullWarp, larger < kTopK ? best : kForcedScore), 1u);
}

// Exact whatever the scores: the largest key below the one found before, 16 times. Rare, so the row is read again
// rather than held in registers.
template <int kThreads, typename Candidates>
__device__ __forceinline__ void select_one_by_one(const Candidates& candidates, Selection<kThreads>& shared) {
  const int lane = threadIdx.x % 32, warp = row_thread<kThreads>() / 32;
  Key previous = ~static_cast<Key>(0);
  for (int place = 0; place < kTopK; ++place) {
    Key best = kNoCandidate;
    for (int column = row_thread<kThreads>(); column < candidates.columns; column += kThreads) {
      const Key key = candidates.full_key(column, score_key(candidates.row[column]));
      if (key < previous) best = max(best, key);
    }
    Key row_best = best;
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) row_best = max(row_best, __shfl_xor_sync(kFullWarp, row_best, mask));
    row_sync<kThreads>();
    if (lane == 0) shared.warp_best[warp] = row_best;
    row_sync<kThreads>();
#pragma unroll
    for (int w = 0; w < Selection<kThreads>::kWarps; ++w) row_best = max(row_best, shared.warp_best[w]);
    if (best == row_best && best != kNoCandidate) shared.winner[place] = best;
    previous = row_best;
  }
}

// Leaves the 16 best candidates in shared.winner; places without one hold kNoCandidate.
template <int kThreads, typename Candidates>
__device__ __forceinline__ void select(const Candidates& candidates, Selection<kThreads>& shared) {
  const int thread = row_thread<kThreads>();
  if (thread == 0) shared.count = 0;
  if (thread < kTopK) shared.winner[thread] = kNoCandidate;
#pragma unroll
  for (int i = thread; i < kListCapacity; i += kThreads) shared.list[i] = kNoCandidate;
  int count = candidates.columns;
  if (count <= (kThreads < kFewColumns ? kThreads : kFewColumns)) {
    if (thread < count) shared.list[thread] = candidates.full_key(thread, candidates.key[0]);
    row_sync<kThreads>();
  } else {
    const ScoreKey bound = score_bound(candidates, shared);
    int place = candidates.count(bound);
    if (place > 0) {
      place = atomicAdd(&shared.count, place);
#pragma unroll
      for (int i = 0; i < Candidates::kCount; ++i) {
        if (candidates.key[i] < bound) continue;
        if (place < kListCapacity) shared.list[place] = candidates.full_key(candidates.column_of(i), candidates.key[i]);
        ++place;
      }
    }
    row_sync<kThreads>();
    count = shared.count;
  }
  if (count > kListCapacity) {
    select_one_by_one(candidates, shared);
  } else {
    for (int entry = thread; entry < count; entry += kThreads) {
      const Key key = shared.list[entry];
      const int rank = count_larger(shared.list, count, key);
      if (rank < kTopK) shared.winner[rank] = key;
    }
  }
  row_sync<kThreads>();
}

// A selected row, in the order of its ids: place, raw score and id of this lane's winner, for the lanes below kTopK.
// Places without a winner hold (-inf, -1) and are the last ones.
struct Selected {
  int place, bits, id;
};

__device__ __forceinline__ Selected order_by_id(const Key (&winner)[kTopK], int lane) {
  Selected selected;
  const Key key = lane < kTopK ? winner[lane] : kNoCandidate;
  selected.id = key == kNoCandidate ? -1 : id_of(key);
  selected.bits = __float_as_int(key == kNoCandidate ? kMinusInfinity : score_of(key));
  selected.place = selected.id < 0 ? lane : 0;  // ranks are dense, so empty places are the last ones already
#pragma unroll
  for (int i = 0; i < kTopK; ++i) {
    // As an unsigned number, an empty place comes after every id.
    const unsigned other = static_cast<unsigned>(__shfl_sync(kFullWarp, selected.id, i));
    if (selected.id >= 0) selected.place += other < static_cast<unsigned>(selected.id);
  }
  return selected;
}

// The row that select() has left.
template <int kThreads, typename Candidates>
__device__ __forceinline__ Selected selected_row(const Candidates& candidates, const Selection<kThreads>& shared,
                                                 int lane) {
  Selected selected = order_by_id(shared.winner, lane);
  // A key tells neither NaN from -inf nor -0.0 from +0.0.
  const float score = __int_as_float(selected.bits);
  if (selected.id >= 0 && (score == kMinusInfinity || score == 0.0f)) {
    selected.bits = __float_as_int(candidates.row[selected.id - candidates.offset >> candidates.shift]);
  }
  return selected;
}

}  // namespace kernels
