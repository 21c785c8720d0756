// Rotary position embedding: pairs (i, i + half) of the first 2 * half dimensions.
#include "../native/vector.h"

using namespace specdec;

namespace {

template <typename T>
void rotate(const void* heads, const float* cos, const float* sin, void* out, int64_t tokens, int64_t token_stride,
            int64_t num_heads, int64_t dim, int64_t half) {
    for (int64_t t = 0; t < tokens; ++t) {
        const float *c = cos + t * half, *s = sin + t * half;
        for (int64_t h = 0; h < num_heads; ++h) {
            const T* from = (const T*)heads + t * token_stride + h * dim;
            T* to = (T*)out + (t * num_heads + h) * dim;
            for (int64_t i = 0; i < half; i += LANES) {
                const int64_t n = half - i < LANES ? half - i : LANES;
                const Floats low = load_some(from + i, n), high = load_some(from + half + i, n);
                const Floats cosine = load_some(c + i, n), sine = load_some(s + i, n);
                store_some(to + i, low * cosine - high * sine, n);
                store_some(to + half + i, high * cosine + low * sine, n);
            }
            std::memcpy(to + 2 * half, from + 2 * half, (dim - 2 * half) * sizeof(T));
        }
    }
}

}  // namespace

extern "C" void specdec_rotate(int dtype, const void* heads, const float* cos, const float* sin, void* out,
                               int64_t tokens, int64_t token_stride, int64_t num_heads, int64_t dim, int64_t half) {
    SPECDEC_BY_DTYPE(dtype, rotate, heads, cos, sin, out, tokens, token_stride, num_heads, dim, half);
}
