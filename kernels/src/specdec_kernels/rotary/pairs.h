// Rotation of one head.
#pragma once
#include "../native/vector.h"

namespace specdec {

// Pairs (i, i + half) of the first 2 * half dimensions turn; the others are copied.
template <typename T>
inline void rotate_head(const T* from, T* to, const float* cos, const float* sin, int64_t dim, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t n = half - i < LANES ? half - i : LANES;
        const Floats low = load_some(from + i, n), high = load_some(from + half + i, n);
        const Floats cosine = load_some(cos + i, n), sine = load_some(sin + i, n);
        store_some(to + i, fused(low, cosine, -(high * sine)), n);
        store_some(to + half + i, fused(high, cosine, low * sine), n);
    }
    std::memcpy(to + 2 * half, from + 2 * half, (dim - 2 * half) * sizeof(T));
}

}  // namespace specdec
