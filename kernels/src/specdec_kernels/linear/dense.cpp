// Products with float32 and bfloat16 weights, sixteen outputs side by side.
//
// A row's sum runs over the inputs in their order, whatever rows stand beside it.
#include "../native/vector.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

using namespace specdec;

namespace {

constexpr int64_t ROWS = 8;  // of activations for which a weight is read once

inline Floats dot(Floats sums, const float* weights, const float* x) {
    return fused(load(weights), splat(*x), sums);
}

// Two inputs at a time.
inline Floats dot(Floats sums, const BFloat16* weights, const BFloat16* x) {
#ifdef __AVX512BF16__
    int32_t two;
    std::memcpy(&two, x, 4);
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_loadu_si512(weights),
                                    (__m512bh)_mm512_set1_epi32(two));
#else
    Words pair;
    std::memcpy(&pair, weights, sizeof pair);
    sums = fused((Floats)(pair << 16), splat(to_float(x[0])), sums);
    return fused((Floats)(pair & 0xffff0000), splat(to_float(x[1])), sums);
#endif
}

struct Product {
    const void *x, *weights;  // weights: [outputs / 16, inputs / Q, 16, Q], Q of 4 bytes
    const float* bias;
    void* out;
    int64_t inputs, outputs;
};

// N rows, C blocks of sixteen outputs.
template <typename T, int N, int C>
void multiply(const Product& p, int64_t row, int64_t block) {
    constexpr int64_t Q = 4 / sizeof(T);
    const T* x = (const T*)p.x + row * p.inputs;
    const T* weights = (const T*)p.weights + block * p.inputs * LANES;
    Floats sums[N][C] = {};
    for (int64_t k = 0; k < p.inputs; k += Q)
        for (int c = 0; c < C; ++c)
            for (int n = 0; n < N; ++n)
                sums[n][c] = dot(sums[n][c], weights + (c * p.inputs + k) * LANES, x + n * p.inputs + k);
    for (int n = 0; n < N; ++n)
        for (int c = 0; c < C; ++c) {
            const int64_t at = (block + c) * LANES, rest = p.outputs - at, count = rest < LANES ? rest : LANES;
            const Floats result = p.bias ? sums[n][c] + load_some(p.bias + at, count) : sums[n][c];
            store_some((T*)p.out + (row + n) * p.outputs + at, result, count);
        }
}

template <typename T, int C>
void multiply_rows(const Product& p, int64_t rows, int64_t block) {
    int64_t r = 0;
    for (; r + ROWS <= rows; r += ROWS) multiply<T, ROWS, C>(p, r, block);
    switch (rows - r) {
        case 1: return multiply<T, 1, C>(p, r, block);
        case 2: return multiply<T, 2, C>(p, r, block);
        case 3: return multiply<T, 3, C>(p, r, block);
        case 4: return multiply<T, 4, C>(p, r, block);
        case 5: return multiply<T, 5, C>(p, r, block);
        case 6: return multiply<T, 6, C>(p, r, block);
        case 7: return multiply<T, 7, C>(p, r, block);
    }
}

template <typename T>
void dense_linear(const Product& p, int64_t rows, int threads) {
    constexpr int64_t WIDE = 2;  // blocks side by side
    const int64_t blocks = (p.outputs + LANES - 1) / LANES, wide = blocks / WIDE;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static) nowait
        for (int64_t b = 0; b < wide; ++b) multiply_rows<T, WIDE>(p, rows, b * WIDE);
#pragma omp for schedule(static)
        for (int64_t b = wide * WIDE; b < blocks; ++b) multiply_rows<T, 1>(p, rows, b);
    }
}

// Rows in groups, each with weights of its own: rows offsets[g] to offsets[g + 1] with those of g.
template <typename T>
void grouped_linear(const Product& p, const int64_t* offsets, int64_t groups, int threads) {
    constexpr int64_t WIDE = 2, CHUNK = 8;
    const int64_t blocks = (p.outputs + LANES - 1) / LANES, parts = (blocks + WIDE - 1) / WIDE;
#pragma omp parallel for schedule(dynamic, CHUNK) num_threads(threads) if (threads > 1)
    for (int64_t task = 0; task < groups * parts; ++task) {
        const int64_t group = task / parts, block = task % parts * WIDE, first = offsets[group];
        const int64_t rows = offsets[group + 1] - first;
        if (!rows) continue;
        const Product own{(const T*)p.x + first * p.inputs, (const T*)p.weights + group * blocks * LANES * p.inputs,
                          nullptr, (T*)p.out + first * p.outputs, p.inputs, p.outputs};
        if (block + WIDE <= blocks)
            multiply_rows<T, WIDE>(own, rows, block);
        else
            multiply_rows<T, 1>(own, rows, block);
    }
}

}  // namespace

extern "C" void specdec_dense_linear(int dtype, const void* x, const void* weights, const float* bias, void* out,
                                     int64_t rows, int64_t inputs, int64_t outputs, int threads) {
    const Product product{x, weights, bias, out, inputs, outputs};
    SPECDEC_BY_DTYPE(dtype, dense_linear, product, rows, threads);
}

extern "C" void specdec_grouped_linear(int dtype, const void* x, const void* weights, const int64_t* offsets, void* out,
                                       int64_t groups, int64_t inputs, int64_t outputs, int threads) {
    const Product product{x, weights, nullptr, out, inputs, outputs};
    SPECDEC_BY_DTYPE(dtype, grouped_linear, product, offsets, groups, threads);
}
