// Unsigned keys for the order of candidates: a larger key ranks earlier.
// Needs: constants.h.j2.
inline namespace kernels {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kIdBits = 13;
static_assert(kMaxBlocks == 1 << kIdBits, "an id fits its bits");

// A key made only from the score. 0 is no candidate, and all forced candidates share the largest key.
using ScoreKey = unsigned;
constexpr ScoreKey kForcedScore = 0xffffffffu;

// A key that is unique in a row. It orders by candidate or not, then forced or not, then score, then the lower id.
using Key = unsigned long long;
constexpr Key kNoCandidate = 0;

// Maps scores to unsigned integers with the same order, never 0 or kForcedScore. NaN counts as -inf and -0.0 as +0.0.
__device__ __forceinline__ ScoreKey score_key(float score) {
  const int bits = __float_as_int(fmaxf(score, kMinusInfinity) + 0.0f);  // fmaxf drops NaN
  return static_cast<unsigned>(bits) ^ (static_cast<unsigned>(bits >> 31) | 0x80000000u);
}

__device__ __forceinline__ Key candidate_key(ScoreKey score, int id, bool forced) {
  return static_cast<Key>(forced ? 3 : 2) << (32 + kIdBits) | static_cast<Key>(score) << kIdBits |
         static_cast<Key>(kMaxBlocks - 1 - id);
}

__device__ __forceinline__ ScoreKey score_key_of(Key key) { return static_cast<ScoreKey>(key >> kIdBits); }

__device__ __forceinline__ bool is_forced(Key key) { return key >> (32 + kIdBits) == 3; }

// The score that a key was made from; NaN comes back as -inf, and -0.0 as +0.0.
__device__ __forceinline__ float score_of_score_key(ScoreKey key) {
  return __int_as_float(static_cast<int>(key & 0x80000000u ? key ^ 0x80000000u : ~key));
}

__device__ __forceinline__ float score_of(Key key) { return score_of_score_key(score_key_of(key)); }

__device__ __forceinline__ int id_of(Key key) {
  return kMaxBlocks - 1 - static_cast<int>(key & static_cast<Key>(kMaxBlocks - 1));
}

// How many keys in `list[0, count)` are larger than `key`. All lanes read the same entry at a time. Entries up to the
// next multiple of 8 must hold kNoCandidate, so that 8 are read at once.
__device__ __forceinline__ int count_larger(const Key* list, int count, Key key) {
  int larger = 0;
  for (int i = 0; i < count; i += 8) {
#pragma unroll
    for (int j = 0; j < 8; ++j) larger += list[i + j] > key;
  }
  return larger;
}

}  // namespace kernels
