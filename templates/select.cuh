// Selection: the Top16 candidates of one (token, head) row.
//
// kThreads threads take a row: a whole CTA, or with 32 a warp. Thread i holds the columns i, i + kThreads, ...; the 32
// residues of the column modulo 32 are 32 disjoint groups, so the 16th largest of the groups' best scores bounds the
// 16th best score from below. The few candidates at or above the bound are listed and ranked by counting. Should a row
// crowd its large or equal scores into few groups, so that the list overflows, the candidates are taken one by one
// instead.
inline namespace kernels {

constexpr int kListCapacity = 256;

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
  ScoreKey group_best[kWarps][32];
  ScoreKey bound;
  int count;
  Key list[kListCapacity];
  float list_scores[kListCapacity];
  Key winner[kTopK];
  float winner_scores[kTopK];
  Key warp_best[kWarps];
};

// This thread's candidates, and their score keys. Ids of a row are `column * scale + offset`; limits on ids become
// limits on columns, so that one comparison tells that a column is neither forced nor past the end.
template <int kThreads, int kPerThread>
struct Candidates {
  float score[kPerThread];
  ScoreKey key[kPerThread];
  const float* row;
  int scale, offset;
  int columns;        // columns of the row that are candidates
  int forced_before;  // columns below this and from `forced_from` on are forced
  int forced_from;

  __device__ __forceinline__ static int column_of(int i) { return i * kThreads + row_thread<kThreads>(); }

  // Columns whose id is below `id`.
  __device__ __forceinline__ int columns_below(int id) const { return id > offset ? (id - offset - 1) / scale + 1 : 0; }

  __device__ __forceinline__ bool is_forced(int column) const {
    return column < forced_before || column >= forced_from;
  }

  __device__ __forceinline__ void load(const msa_icp::SelectParams& p, int token, int head) {
    row = p.scores + token * p.score_token_stride + head * p.score_head_stride;
    scale = p.index_scale;
    offset = p.index_offset;
    // The first columns are loaded along with the number of pages rather than after it.
    score[0] = column_of(0) < p.score_columns ? row[column_of(0)] : 0.0f;
    const int num_valid = p.num_valid_pages[token];
    columns = min(columns_below(min(num_valid, kMaxBlocks)), p.score_columns);
    forced_before = min(columns_below(p.force_begin_blocks), columns);
    forced_from = max(min(columns_below(max(max(num_valid, 0) - p.force_end_blocks, 0)), columns), forced_before);
#pragma unroll
    for (int i = 1; i < kPerThread; ++i) score[i] = column_of(i) < columns ? row[column_of(i)] : 0.0f;
    const unsigned free_columns = forced_from - forced_before;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const bool is_free = static_cast<unsigned>(column_of(i) - forced_before) < free_columns;
      key[i] = is_free ? score_key(score[i]) : column_of(i) < columns ? kForcedScore : 0;
    }
  }

  __device__ __forceinline__ Key full_key(int column, float value) const {
    return candidate_key(value, column * scale + offset, is_forced(column));
  }
};

// The 16th largest of the 32 groups' best scores, or 1 (every candidate) where fewer than 16 groups have one.
template <int kThreads, int kPerThread>
__device__ __forceinline__ ScoreKey score_bound(const Candidates<kThreads, kPerThread>& candidates,
                                                Selection<kThreads>& shared) {
  const int lane = threadIdx.x % 32, warp = row_thread<kThreads>() / 32;
  ScoreKey best = candidates.key[0];
#pragma unroll
  for (int i = 1; i < kPerThread; ++i) best = max(best, candidates.key[i]);
  shared.group_best[warp][lane] = best;
  row_sync<kThreads>();
  if (warp == 0) {
#pragma unroll
    for (int w = 1; w < Selection<kThreads>::kWarps; ++w) best = max(best, shared.group_best[w][lane]);
    __syncwarp();
    shared.group_best[0][lane] = best;
    __syncwarp();
    int larger = 0, as_large = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const ScoreKey other = shared.group_best[0][i];
      larger += other > best;
      as_large += other >= best;
    }
    const unsigned holders = __ballot_sync(kFullWarp, best != 0 && larger < kTopK && as_large >= kTopK);
    const ScoreKey bound = __shfl_sync(kFullWarp, best, holders ? __ffs(holders) - 1 : 0);
    if (lane == 0) shared.bound = holders ? bound : 1;
  }
  row_sync<kThreads>();
  return shared.bound;
}

// Exact whatever the scores: the largest key below the one found before, 16 times. Rare, so the row is read again
// rather than held in registers.
template <int kThreads, int kPerThread>
__device__ __forceinline__ void select_one_by_one(const Candidates<kThreads, kPerThread>& candidates,
                                                  Selection<kThreads>& shared) {
  const int lane = threadIdx.x % 32, warp = row_thread<kThreads>() / 32;
  Key previous = ~static_cast<Key>(0);
  for (int place = 0; place < kTopK; ++place) {
    Key best = kNoCandidate;
    float best_score = 0.0f;
    for (int column = row_thread<kThreads>(); column < candidates.columns; column += kThreads) {
      const float score = candidates.row[column];
      const Key key = candidates.full_key(column, score);
      if (key < previous && key > best) {
        best = key;
        best_score = score;
      }
    }
    Key row_best = best;
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) row_best = max(row_best, __shfl_xor_sync(kFullWarp, row_best, mask));
    row_sync<kThreads>();
    if (lane == 0) shared.warp_best[warp] = row_best;
    row_sync<kThreads>();
#pragma unroll
    for (int w = 0; w < Selection<kThreads>::kWarps; ++w) row_best = max(row_best, shared.warp_best[w]);
    if (best == row_best && best != kNoCandidate) {
      shared.winner[place] = best;
      shared.winner_scores[place] = best_score;
    }
    previous = row_best;
  }
}

// Leaves the 16 best candidates in shared.winner; places without one hold kNoCandidate.
template <int kThreads, int kPerThread>
__device__ __forceinline__ void select(const Candidates<kThreads, kPerThread>& candidates,
                                       Selection<kThreads>& shared) {
  const int thread = row_thread<kThreads>();
  if (thread == 0) shared.count = 0;
  if (thread < kTopK) shared.winner[thread] = kNoCandidate;
  const ScoreKey bound = score_bound(candidates, shared);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (candidates.key[i] >= bound) {
      const int place = atomicAdd(&shared.count, 1);
      if (place < kListCapacity) {
        shared.list[place] = candidates.full_key(candidates.column_of(i), candidates.score[i]);
        shared.list_scores[place] = candidates.score[i];
      }
    }
  }
  row_sync<kThreads>();
  const int count = shared.count;
  if (count > kListCapacity) {
    select_one_by_one(candidates, shared);
  } else {
    for (int entry = thread; entry < count; entry += kThreads) {
      const Key key = shared.list[entry];
      const int rank = count_larger(shared.list, count, key);
      if (rank < kTopK) {
        shared.winner[rank] = key;
        shared.winner_scores[rank] = shared.list_scores[entry];
      }
    }
  }
  row_sync<kThreads>();
}

// A selected row, in the order of its ids: place, raw score and id of this lane's winner, for the lanes below kTopK.
// Places without a winner hold (-inf, -1) and are the last ones.
struct Selected {
  int place, bits, id;
};

__device__ __forceinline__ Selected order_by_id(const Key (&winner)[kTopK], const float (&scores)[kTopK], int lane) {
  Selected selected;
  const Key key = lane < kTopK ? winner[lane] : kNoCandidate;
  selected.id = key == kNoCandidate ? -1 : id_of(key);
  selected.bits = __float_as_int(key == kNoCandidate ? kMinusInfinity : scores[lane]);
  selected.place = selected.id < 0 ? lane : 0;  // ranks are dense, so empty places are the last ones already
#pragma unroll
  for (int i = 0; i < kTopK; ++i) {
    const int other = __shfl_sync(kFullWarp, selected.id, i);
    if (selected.id >= 0) selected.place += other >= 0 && other < selected.id;
  }
  return selected;
}

}  // namespace kernels
