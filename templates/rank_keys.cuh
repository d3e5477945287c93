// The order of candidates as unsigned 64-bit keys: a larger key ranks earlier, and no two candidates share one.
namespace {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kIdBits = 13;
static_assert(kMaxBlocks == 1 << kIdBits, "an id fits its bits");

using Key = unsigned long long;
constexpr Key kNoCandidate = 0;

// Maps FP32 bits to unsigned integers in the order of the numbers: NaN counts as -inf, -0.0 as +0.0.
__device__ __forceinline__ unsigned ordered_bits(int bits) {
  const unsigned u = static_cast<unsigned>(bits);
  if ((u & 0x7fffffffu) > 0x7f800000u) return ~0xff800000u;
  if (u == 0x80000000u) return 0x80000000u;
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// Valid, then forced, then score, then the lower id.
__device__ __forceinline__ Key candidate_key(int score_bits, int id, bool forced) {
  return static_cast<Key>(forced ? 3 : 2) << (32 + kIdBits) | static_cast<Key>(ordered_bits(score_bits)) << kIdBits |
         static_cast<Key>(kMaxBlocks - 1 - id);
}

__device__ __forceinline__ int id_of(Key key) {
  return kMaxBlocks - 1 - static_cast<int>(key & static_cast<Key>(kMaxBlocks - 1));
}

// Keys in `list[0, count)` that are larger than `key`. All lanes read the same entry at a time.
__device__ __forceinline__ int count_larger(const Key* list, int count, Key key) {
  int larger = 0;
#pragma unroll 8
  for (int i = 0; i < count; ++i) larger += list[i] > key;
  return larger;
}

}  // namespace
