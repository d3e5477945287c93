// Sizes of the model and the protocol (flashinfer_msa/layout.py).
inline constexpr int kHeads = {{ NUM_HEADS }};
inline constexpr int kTopK = {{ TOP_K }};
inline constexpr int kMaxBlocks = {{ MAX_BLOCKS }};
inline constexpr int kRowWords = {{ ROW_WORDS }};
inline constexpr int kTaggedWords = {{ TAGGED_WORDS }};
inline constexpr float kMinusInfinity = -__builtin_huge_valf();
