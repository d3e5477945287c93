// What both selections share: a row and its candidates, the slow selection for many equal scores, and the order by id.
// Needs: params.h, constants.h.j2, rank_keys.cuh.
inline namespace kernels {

// How many columns have an id, `(column << shift) + offset`, below `id`.
__device__ __forceinline__ int columns_below(int id, int shift, int offset) {
  return id > offset ? (id - offset - 1 >> shift) + 1 : 0;
}

// A score row, and which of its columns are candidates. Ids ascend with columns, so limits on ids are limits on
// columns.
struct ScoreRow {
  const float* score;
  int shift, offset;
  int columns;        // columns below this are candidates
  int forced_before;  // candidates below this and from `forced_from` on are forced
  int forced_from;

  __device__ __forceinline__ ScoreRow(const msa_icp::SelectParams& p, int token, int head)
      : score(p.scores + token * p.score_token_stride + head * p.score_head_stride),
        shift(p.index_scale - 1),  // the scale is 1 or 2
        offset(p.index_offset) {}

  __device__ __forceinline__ int columns_below(int id) const { return kernels::columns_below(id, shift, offset); }

  // Must be called before anything that follows.
  __device__ __forceinline__ void limit(const msa_icp::SelectParams& p, int num_valid) {
    columns = min(columns_below(min(num_valid, kMaxBlocks)), p.score_columns);
    forced_before = min(columns_below(p.force_begin_blocks), columns);
    forced_from = max(min(columns_below(max(max(num_valid, 0) - p.force_end_blocks, 0)), columns), forced_before);
  }

  __device__ __forceinline__ Key key(int column) const {
    const bool forced = column < forced_before || column >= forced_from;
    return candidate_key(score_key(score[column]), (column << shift) + offset, forced);
  }
};

// A barrier of the warps that take a row: one warp, or all of the CTA.
template <int kWarps>
__device__ __forceinline__ void row_sync() {
  if (kWarps == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Finds the largest key below the previous one, 16 times; right for any scores. It is rare, so it reads the row again
// and does not hold it in registers. Positions without a candidate hold kNoCandidate.
template <int kWarps, typename Shared>
__device__ __forceinline__ void select_one_by_one(const ScoreRow& row, Shared& shared, int warp, int lane) {
  Key previous = ~static_cast<Key>(0);
  for (int position = 0; position < kTopK; ++position) {
    Key best = kNoCandidate;
    for (int column = warp * 32 + lane; column < row.columns; column += kWarps * 32) {
      const Key key = row.key(column);
      if (key < previous) best = max(best, key);
    }
    Key row_best = best;
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) row_best = max(row_best, __shfl_xor_sync(kFullWarp, row_best, mask));
    row_sync<kWarps>();
    if (lane == 0) shared.warp_best[warp] = row_best;
    row_sync<kWarps>();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) row_best = max(row_best, shared.warp_best[w]);
    if (row_best == kNoCandidate ? warp == 0 && lane == 0 : best == row_best) shared.winner[position] = row_best;
    previous = row_best;
  }
  row_sync<kWarps>();
}

// A selected row, ordered by id: position, raw score and id of this lane's winner, for lanes below kTopK.
// Positions without a winner hold (-inf, -1) and come last.
struct Selected {
  int position, bits, id;
};

__device__ __forceinline__ Selected order_by_id(const Key (&winner)[kTopK], int lane) {
  Selected selected;
  const Key key = lane < kTopK ? winner[lane] : kNoCandidate;
  selected.id = key == kNoCandidate ? -1 : id_of(key);
  selected.bits = __float_as_int(key == kNoCandidate ? kMinusInfinity : score_of(key));
  selected.position = selected.id < 0 ? lane : 0;  // ranks are dense, so empty positions come last
#pragma unroll
  for (int i = 0; i < kTopK; ++i) {
    // As an unsigned number, the -1 of an empty position is larger than every id.
    const unsigned other = static_cast<unsigned>(__shfl_sync(kFullWarp, selected.id, i));
    if (selected.id >= 0) selected.position += other < static_cast<unsigned>(selected.id);
  }
  return selected;
}

// The 16 winners of a row, ordered by id.
__device__ __forceinline__ Selected selected_row(const ScoreRow& row, const Key (&winner)[kTopK], int lane) {
  Selected selected = order_by_id(winner, lane);
  // A key does not distinguish NaN from -inf, nor -0.0 from +0.0, so those scores are read again.
  const float score = __int_as_float(selected.bits);
  if (selected.id >= 0 && (score == kMinusInfinity || score == 0.0f)) {
    selected.bits = __float_as_int(row.score[selected.id - row.offset >> row.shift]);
  }
  return selected;
}

}  // namespace kernels
