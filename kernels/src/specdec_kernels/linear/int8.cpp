// Products with int8 weights: activations are quantised per token and group of 64 inputs.
//
// Sums of integers are exact in any order, and a row adds its groups in theirs, so that its bits do
// not depend on the rows beside it. Needs the dot product of bytes of AVX-512 VNNI or AVX-VNNI.
#include "bytes.h"

extern "C" int specdec_has_int8() {
#ifdef SPECDEC_INT8
    return 1;
#else
    return 0;
#endif
}

#ifdef SPECDEC_INT8
using namespace specdec;

namespace {

constexpr int64_t GROUP = 64;  // inputs that share a scale
constexpr int64_t ROWS = 8;    // of activations for which a weight is read once

struct Product {
    const uint8_t* weights;  // [outputs / 16, inputs / 4, 16, 4], 128 added
    const float *scales, *bias;
    int64_t groups, outputs;
};

// N rows, C blocks of sixteen outputs, and S sums side by side for each, to hide their latency.
template <typename T, int N, int C, int S>
void multiply(const Product& p, const Quantized& x, int64_t row, int64_t block, T* out) {
    const int64_t inputs = p.groups * GROUP;
    const int8_t* values = x.values.data() + row * inputs;
    Floats totals[N][C] = {};
    for (int64_t g = 0; g < p.groups; ++g) {
        Ints sums[S][N][C] = {};
        for (int n = 0; n < N; ++n)
            for (int c = 0; c < C; ++c) sums[0][n][c] = Ints{} - 128 * x.sums[(row + n) * p.groups + g];
        for (int64_t k = g * GROUP; k < (g + 1) * GROUP; k += 4 * S)
            for (int s = 0; s < S; ++s)
                for (int c = 0; c < C; ++c) {
                    const Words weights = load_words(p.weights + ((block + c) * inputs + k + 4 * s) * LANES);
                    for (int n = 0; n < N; ++n)
                        sums[s][n][c] = dot(sums[s][n][c], weights, values + n * inputs + k + 4 * s);
                }
        for (int n = 0; n < N; ++n)
            for (int c = 0; c < C; ++c) {
                for (int s = 1; s < S; ++s) sums[0][n][c] += sums[s][n][c];
                totals[n][c] = fused(__builtin_convertvector(sums[0][n][c], Floats),
                                     splat(x.scales[(row + n) * p.groups + g]), totals[n][c]);
            }
    }
    for (int n = 0; n < N; ++n)
        for (int c = 0; c < C; ++c) {
            const int64_t at = (block + c) * LANES, rest = p.outputs - at;
            Floats result = totals[n][c] * load(p.scales + at);
            if (p.bias) result += load(p.bias + at);
            store_some(out + (row + n) * p.outputs + at, result, rest < LANES ? rest : LANES);
        }
}

template <typename T, int C>
void multiply_rows(const Product& p, const Quantized& x, int64_t rows, int64_t block, T* out) {
    int64_t r = 0;
    for (; r + ROWS <= rows; r += ROWS) multiply<T, ROWS, C, 1>(p, x, r, block, out);
    switch (rows - r) {
        case 1: return multiply<T, 1, C, 8 / C>(p, x, r, block, out);
        case 2: return multiply<T, 2, C, 4 / C>(p, x, r, block, out);
        case 3: return multiply<T, 3, C, 4 / C>(p, x, r, block, out);
        case 4: return multiply<T, 4, C, 2 / C>(p, x, r, block, out);
        case 5: return multiply<T, 5, C, 2 / C>(p, x, r, block, out);
        case 6: return multiply<T, 6, C, 1>(p, x, r, block, out);
        case 7: return multiply<T, 7, C, 1>(p, x, r, block, out);
    }
}

template <typename T>
void int8_linear(const void* x, const Product& p, void* out, int64_t rows, int64_t inputs, int threads) {
    const int64_t padded = p.groups * GROUP, blocks = (p.outputs + LANES - 1) / LANES;
    Quantized quantized{std::vector<int8_t>(rows * padded), std::vector<float>(rows * p.groups),
                        std::vector<int32_t>(rows * p.groups)};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; ++r)
            quantize<GROUP>((const T*)x + r * inputs, inputs, quantized.values.data() + r * padded,
                     quantized.scales.data() + r * p.groups, quantized.sums.data() + r * p.groups);
        if (rows < ROWS) {
#pragma omp for schedule(static)
            for (int64_t b = 0; b < blocks; ++b) multiply_rows<T, 1>(p, quantized, rows, b, (T*)out);
        } else {
            const int64_t pairs = blocks / 2;
#pragma omp for schedule(static)
            for (int64_t b = 0; b < pairs; ++b) multiply_rows<T, 2>(p, quantized, rows, b * 2, (T*)out);
#pragma omp single
            if (blocks % 2) multiply_rows<T, 1>(p, quantized, rows, blocks - 1, (T*)out);
        }
    }
}

}  // namespace

extern "C" void specdec_int8_linear(int dtype, const void* x, const void* weights, const float* scales,
                                    const float* bias, void* out, int64_t rows, int64_t inputs, int64_t groups,
                                    int64_t outputs, int threads) {
    const Product product{(const uint8_t*)weights, scales, bias, groups, outputs};
    SPECDEC_BY_DTYPE(dtype, int8_linear, x, product, out, rows, inputs, threads);
}
#endif
