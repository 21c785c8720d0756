// Sums of what a token's experts gave, by their weights.
#include "../native/vector.h"

using namespace specdec;

namespace {

// places: [tokens, count], rows of y; added up in this order.
template <typename T>
void combine(const void* y, const int64_t* places, const float* weights, void* out, int64_t tokens, int64_t count,
             int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < tokens; ++t) {
        T* to = (T*)out + t * width;
        for (int64_t i = 0; i < width; i += LANES) {
            const int64_t rest = width - i < LANES ? width - i : LANES;
            Floats sums = {};
            for (int64_t j = t * count; j < (t + 1) * count; ++j)
                sums = fused(load_some((const T*)y + places[j] * width + i, rest), splat(weights[j]), sums);
            store_some(to + i, sums, rest);
        }
    }
}

}  // namespace

extern "C" void specdec_combine_experts(int dtype, const void* y, const int64_t* places, const float* weights,
                                        void* out, int64_t tokens, int64_t count, int64_t width, int threads) {
    SPECDEC_BY_DTYPE(dtype, combine, y, places, weights, out, tokens, count, width, threads);
}
