// The layout this translation unit is specialised for (flashinfer_msa/layout.py says what the numbers mean).
namespace layout {

inline constexpr int kPageSize = {{ layout.page_size }};
inline constexpr int kRows = {{ layout.rows }};
inline constexpr int kKeyBytes = {{ HEAD_DIM * layout.element.bytes }};
inline constexpr int kRowStride = {{ layout.row_stride }};
inline constexpr int kRankStride = {{ layout.rank_stride }};

// Global key index of local `row` of page `column`.
__device__ __forceinline__ int global_key(int rank, int column, int row) {
  return kPageSize * column + kRankStride * rank + kRowStride * row;
}

}  // namespace layout
