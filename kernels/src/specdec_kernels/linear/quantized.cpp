// Products with quantised weights of which some inputs share a scale: int4, int8 and fp8, as they are published.
//
// Activations in float32 are multiplied by the decoded weights. Those in bfloat16, and integer weights, become
// bytes as they come, as in int8.cpp. A row's sum runs over the inputs in their order, group by group, whatever
// rows stand beside it.
#include <vector>

#include "bytes.h"

using namespace specdec;

namespace {

constexpr int64_t ROWS = 4;  // of activations for which a weight is read once

struct Product {
    const uint8_t* weights;         // [outputs / 16, inputs / QUAD, 16, 4]
    const void *scales, *offsets;   // [outputs / 16, groups, 16] of float or Half; offsets may be null
    const float* bias;
    int64_t inputs, padded, group, groups, outputs;
};

// A format tells the inputs that a word of four bytes holds, the code of zero, and the weight of one of them.
struct Int4 {
    static constexpr int64_t QUAD = 8;
    static constexpr int MIDDLE = 8;
    static Floats value(Words word, int i, int middle) {  // byte i % 4, its lower half first
        const Words code = word >> (8 * (i & 3) + (i & 4)) & 15;
        return __builtin_convertvector((Ints)code - middle, Floats);
    }
};

struct Int8 {
    static constexpr int64_t QUAD = 4;
    static constexpr int MIDDLE = 128;
    static Floats value(Words word, int i, int middle) {
        return __builtin_convertvector((Ints)(word >> (8 * i) & 255) - middle, Floats);
    }
};

struct Float8 {
    static constexpr int64_t QUAD = 4;
    static constexpr int MIDDLE = 0;
    // sign, exponent and mantissa where a float has them; 2^120 makes up for the biases
    static Floats value(Words word, int i, int) {
        const Words code = word >> (8 * i);
        return (Floats)((code & 0x80) << 24 | (code & 0x7f) << 20) * splat(1.329227995784916e36f);
    }
};

// N rows, C blocks of sixteen outputs; x in float32, padded with zeros.
template <typename T, typename F, typename S, int N, int C>
void multiply_floats(const Product& p, const float* x, int64_t row, int64_t block, T* out) {
    const float* values = x + row * p.padded;
    const int middle = p.offsets ? 0 : F::MIDDLE;
    Floats totals[N][C] = {};
    for (int64_t g = 0; g < p.groups; ++g) {
        Floats sums[N][C] = {};
        float whole[N] = {};
        for (int64_t k = g * p.group; k < (g + 1) * p.group; k += F::QUAD)
            for (int c = 0; c < C; ++c) {
                Words word;
                std::memcpy(&word, p.weights + ((block + c) * p.padded + k) / F::QUAD * 4 * LANES, sizeof word);
                for (int i = 0; i < F::QUAD; ++i) {
                    const Floats weight = F::value(word, i, middle);
                    for (int n = 0; n < N; ++n)
                        sums[n][c] = fused(weight, splat(values[n * p.padded + k + i]), sums[n][c]);
                }
            }
        if (p.offsets)
            for (int n = 0; n < N; ++n)
                for (int64_t k = g * p.group; k < (g + 1) * p.group; ++k) whole[n] += values[n * p.padded + k];
        for (int c = 0; c < C; ++c) {
            const int64_t at = ((block + c) * p.groups + g) * LANES;
            const Floats scale = load((const S*)p.scales + at);
            for (int n = 0; n < N; ++n) {
                totals[n][c] = fused(sums[n][c], scale, totals[n][c]);
                if (p.offsets) totals[n][c] = fused(load((const S*)p.offsets + at), splat(whole[n]), totals[n][c]);
            }
        }
    }
    for (int n = 0; n < N; ++n)
        for (int c = 0; c < C; ++c) {
            const int64_t at = (block + c) * LANES, rest = p.outputs - at, count = rest < LANES ? rest : LANES;
            const Floats result = p.bias ? totals[n][c] + load_some(p.bias + at, count) : totals[n][c];
            store_some(out + (row + n) * p.outputs + at, result, count);
        }
}

#ifdef SPECDEC_INT8
// The weights of a word's inputs, times bytes; sums of even and odd steps, to hide their latency.
inline void add(Ints* sums, Int4, const uint8_t* weights, const int8_t* x) {
    const Words word = load_words(weights);
    sums[0] = dot(sums[0], word & 0x0f0f0f0f, x);
    sums[1] = dot(sums[1], word >> 4 & 0x0f0f0f0f, x + 4);
}

inline void add(Ints* sums, Int8, const uint8_t* weights, const int8_t* x) {
    sums[0] = dot(sums[0], load_words(weights), x);
}

inline void add(Ints*, Float8, const uint8_t*, const int8_t*) {}

// The same with activations as bytes, of which A inputs share a scale; A divides a group.
template <typename T, typename F, typename S, int64_t A, int N, int C>
void multiply_bytes(const Product& p, const Quantized& x, int64_t row, int64_t block, T* out) {
    const int8_t* values = x.values.data() + row * p.padded;
    const int64_t parts = p.padded / A;
    const int middle = p.offsets ? 0 : F::MIDDLE;
    Floats totals[N][C] = {};
    for (int64_t a = 0; a < parts; ++a) {
        Ints sums[N][C][2];
        for (int n = 0; n < N; ++n)
            for (int c = 0; c < C; ++c) {
                sums[n][c][0] = Ints{} - middle * x.sums[(row + n) * parts + a];
                sums[n][c][1] = Ints{};
            }
#pragma GCC unroll 16
        for (int64_t k = 0; k < A; k += F::QUAD)
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) {
                const uint8_t* weights = p.weights + ((block + c) * p.padded + a * A + k) / F::QUAD * 4 * LANES;
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) add(sums[n][c], F{}, weights, values + n * p.padded + a * A + k);
            }
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            const int64_t at = ((block + c) * p.groups + a * A / p.group) * LANES;
            const Floats scale = load((const S*)p.scales + at);
            for (int n = 0; n < N; ++n) {
                const float unit = x.scales[(row + n) * parts + a];
                const Floats sum = __builtin_convertvector(sums[n][c][0] + sums[n][c][1], Floats) * unit;
                totals[n][c] = fused(sum, scale, totals[n][c]);
                if (p.offsets)
                    totals[n][c] = fused(load((const S*)p.offsets + at),
                                         splat(unit * x.sums[(row + n) * parts + a]), totals[n][c]);
            }
        }
    }
    for (int n = 0; n < N; ++n)
        for (int c = 0; c < C; ++c) {
            const int64_t at = (block + c) * LANES, rest = p.outputs - at, count = rest < LANES ? rest : LANES;
            const Floats result = p.bias ? totals[n][c] + load_some(p.bias + at, count) : totals[n][c];
            store_some(out + (row + n) * p.outputs + at, result, count);
        }
}
#endif

// C blocks from `block` on, all rows. MULTIPLY<N, C>(row).
#define SPECDEC_ALL_ROWS(rows, MULTIPLY)                            \
    int64_t r = 0;                                                  \
    for (; r + ROWS <= rows; r += ROWS) MULTIPLY(ROWS);             \
    switch (rows - r) {                                             \
        case 1: MULTIPLY(1); break;                                 \
        case 2: MULTIPLY(2); break;                                 \
        case 3: MULTIPLY(3); break;                                 \
    }

template <typename T, typename F, typename S, int C>
void rows_of_floats(const Product& p, const float* x, int64_t rows, int64_t block, T* out) {
#define SPECDEC_MULTIPLY(N) multiply_floats<T, F, S, N, C>(p, x, r, block, out)
    SPECDEC_ALL_ROWS(rows, SPECDEC_MULTIPLY)
#undef SPECDEC_MULTIPLY
}

template <typename T, typename F, typename S>
void by_floats(const void* x, const Product& p, void* out, int64_t rows, int threads) {
    const int64_t blocks = (p.outputs + LANES - 1) / LANES, pairs = blocks / 2;
    std::vector<float> wide(rows * p.padded);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = 0; i < p.inputs; ++i) wide[r * p.padded + i] = to_float(((const T*)x)[r * p.inputs + i]);
#pragma omp for schedule(static) nowait
        for (int64_t b = 0; b < pairs; ++b) rows_of_floats<T, F, S, 2>(p, wide.data(), rows, 2 * b, (T*)out);
#pragma omp single
        if (blocks % 2) rows_of_floats<T, F, S, 1>(p, wide.data(), rows, blocks - 1, (T*)out);
    }
}

#ifdef SPECDEC_INT8
template <typename T, typename F, typename S, int64_t A, int C>
void rows_of_bytes(const Product& p, const Quantized& x, int64_t rows, int64_t block, T* out) {
#define SPECDEC_MULTIPLY(N) multiply_bytes<T, F, S, A, N, C>(p, x, r, block, out)
    SPECDEC_ALL_ROWS(rows, SPECDEC_MULTIPLY)
#undef SPECDEC_MULTIPLY
}

template <typename T, typename F, typename S, int64_t A>
void by_bytes(const void* x, const Product& p, void* out, int64_t rows, int threads) {
    const int64_t blocks = (p.outputs + LANES - 1) / LANES, parts = p.padded / A;
    const int64_t wide = rows == 1 ? 4 : 2, whole = blocks / wide;
    Quantized quantized{std::vector<int8_t>(rows * p.padded), std::vector<float>(rows * parts),
                        std::vector<int32_t>(rows * parts)};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; ++r)
            quantize<A>((const T*)x + r * p.inputs, p.inputs, quantized.values.data() + r * p.padded,
                        quantized.scales.data() + r * parts, quantized.sums.data() + r * parts);
#pragma omp for schedule(static) nowait
        for (int64_t b = 0; b < whole; ++b) {
            if (wide == 4)
                rows_of_bytes<T, F, S, A, 4>(p, quantized, rows, 4 * b, (T*)out);
            else
                rows_of_bytes<T, F, S, A, 2>(p, quantized, rows, 2 * b, (T*)out);
        }
#pragma omp for schedule(static)
        for (int64_t b = whole * wide; b < blocks; ++b) rows_of_bytes<T, F, S, A, 1>(p, quantized, rows, b, (T*)out);
    }
}
#endif

template <typename T, typename F, typename S>
void quantized_linear(const void* x, const Product& p, void* out, int64_t rows, int bytes, int threads) {
#ifdef SPECDEC_INT8
    if (bytes && p.padded % 64 == 0 && p.group % 64 == 0) return by_bytes<T, F, S, 64>(x, p, out, rows, threads);
    if (bytes) return by_bytes<T, F, S, 32>(x, p, out, rows, threads);
#endif
    by_floats<T, F, S>(x, p, out, rows, threads);
}

template <typename T, typename F>
void with_scales(int half, const void* x, const Product& p, void* out, int64_t rows, int bytes, int threads) {
    if (half)
        quantized_linear<T, F, Half>(x, p, out, rows, bytes, threads);
    else
        quantized_linear<T, F, float>(x, p, out, rows, bytes, threads);
}

template <typename T>
void of_kind(int kind, int half, const void* x, const Product& p, void* out, int64_t rows, int bytes, int threads) {
    if (kind == 0) return with_scales<T, Int4>(half, x, p, out, rows, bytes, threads);
    if (kind == 1) return with_scales<T, Int8>(half, x, p, out, rows, bytes, threads);
    with_scales<T, Float8>(half, x, p, out, rows, 0, threads);
}

}  // namespace

// kind: 0 int4, 1 int8, 2 fp8. half: scales and offsets are Half. bytes: activations become bytes.
extern "C" void specdec_quantized_linear(int dtype, int kind, int half, int bytes, const void* x, const void* weights,
                                       const void* scales, const void* offsets, const float* bias, void* out,
                                       int64_t rows, int64_t inputs, int64_t padded, int64_t group, int64_t outputs,
                                       int threads) {
    const Product product{(const uint8_t*)weights, scales, offsets, bias, inputs, padded, group, padded / group,
                          outputs};
    SPECDEC_BY_DTYPE(dtype, of_kind, kind, half, x, product, out, rows, bytes, threads);
}
