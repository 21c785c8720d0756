// Rotary position embedding.
#include "pairs.h"

using namespace specdec;

namespace {

template <typename T>
void rotate(const void* heads, const float* cos, const float* sin, void* out, int64_t tokens, int64_t token_stride,
            int64_t num_heads, int64_t dim, int64_t half) {
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t h = 0; h < num_heads; ++h)
            rotate_head((const T*)heads + t * token_stride + h * dim, (T*)out + (t * num_heads + h) * dim,
                        cos + t * half, sin + t * half, dim, half);
}

}  // namespace

extern "C" void specdec_rotate(int dtype, const void* heads, const float* cos, const float* sin, void* out,
                               int64_t tokens, int64_t token_stride, int64_t num_heads, int64_t dim, int64_t half) {
    SPECDEC_BY_DTYPE(dtype, rotate, heads, cos, sin, out, tokens, token_stride, num_heads, dim, half);
}
