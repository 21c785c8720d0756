// Sixteen floats at a time, for any instruction set the compiler is told of.
//
// Every kernel here computes a row in an order that the row alone decides, never its neighbours or
// the number of threads: that is what makes output with and without speculation identical to the bit.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__FMA__)
#include <immintrin.h>
#endif

namespace specdec {

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct BFloat16 {
    uint16_t bits;
};

struct E4M3 {  // 4 bits of exponent, no infinity
    uint8_t bits;
};

struct Half {  // IEEE's, 5 bits of exponent
    uint16_t bits;
};

// a * b + c, rounded once where the processor can. Said, not left to the compiler (-ffp-contract=off):
// it may fuse a sum in one function and not in another.
static inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    std::memcpy(x, &a, sizeof a);
    std::memcpy(y, &b, sizeof b);
    std::memcpy(z, &c, sizeof c);
    for (int h = 0; h < 2; ++h) z[h] = _mm256_fmadd_ps(x[h], y[h], z[h]);
    std::memcpy(&c, z, sizeof c);
    return c;
#elif defined(__FP_FAST_FMAF)
    for (int i = 0; i < LANES; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

static inline Floats choose(Ints where, Floats yes, Floats no) {
    return (Floats)((where & (Ints)yes) | (~where & (Ints)no));
}

static inline Floats splat(float value) { return Floats{} + value; }

static inline Floats load(const float* from) {
    Floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

static inline Floats load(const BFloat16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

// float8_e4m3fn: sign, exponent and mantissa where a float has them; 2^120 makes up for the biases.
static inline Floats load(const E4M3* from) {
    unsigned char bytes[LANES];
    std::memcpy(bytes, from, sizeof bytes);
    Words code;
    for (int i = 0; i < LANES; ++i) code[i] = bytes[i];
    const Words magnitude = code & 0x7f;
    const Floats value = (Floats)((code & 0x80) << 24 | magnitude << 20) * splat(1.329227995784916e36f);
    const Ints nan = (Ints)(magnitude == 0x7f);
    return (Floats)((nan & 0x7fc00000) | (~nan & (Ints)value));
}

static inline Floats load(const Half* from) {
    Floats values;
#if defined(__AVX512F__)
    __m256i halves;
    std::memcpy(&halves, from, sizeof halves);
    values = (Floats)_mm512_cvtph_ps(halves);
#else
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const Words wide = __builtin_convertvector(halves, Words);
    // exponent and mantissa where a float has them; 2^112 makes up for the biases, subnormals included
    values = (Floats)((wide & 0x7fff) << 13) * splat(5.192296858534828e33f);
    values = (Floats)((Words)values | (wide & 0x8000) << 16);
#endif
    return values;
}

static inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

// Rounds to nearest, ties to even, as torch does; NaN stays NaN.
static inline void store(BFloat16* to, Floats values) {
    Words bits = (Words)values;
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words nan = (Words)(values != values);
    const Halves halves = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), Halves);
    std::memcpy(to, &halves, sizeof halves);
}

// Rounds to nearest, ties to even; what is beyond 448 becomes that.
static inline void store(E4M3* to, Floats values) {
    const Words bits = (Words)values, sign = bits >> 24 & 0x80;
    Floats magnitude = (Floats)(bits & 0x7fffffff);
    const Ints nan = magnitude != magnitude;
    magnitude = choose(magnitude > 448.0f, splat(448.0f), magnitude);
    const Words own = (Words)magnitude;
    const Words normal = ((own + 0x7ffff + ((own >> 20) & 1)) >> 20) - (120 << 3);
    // below 2^-6 in steps of 2^-9, which is what a sum with 2^14 is rounded to
    const Words small = (Words)(magnitude + 16384.0f) - 0x46800000;
    const Words code = (Words)choose(magnitude < 0.015625f, (Floats)small, (Floats)normal);
    const Words result = sign | (code & ~(Words)nan) | ((Words)nan & 0x7f);
    unsigned char bytes[LANES];
    for (int i = 0; i < LANES; ++i) bytes[i] = (unsigned char)result[i];
    std::memcpy(to, bytes, sizeof bytes);
}

// The first `count` lanes; the others are zero.
template <typename T>
static inline Floats load_some(const T* from, int64_t count) {
    if (count == LANES) return load(from);
    T lanes[LANES] = {};
    std::memcpy(lanes, from, count * sizeof(T));
    return load(lanes);
}

template <typename T>
static inline void store_some(T* to, Floats values, int64_t count) {
    if (count == LANES) return store(to, values);
    T lanes[LANES];
    store(lanes, values);
    std::memcpy(to, lanes, count * sizeof(T));
}

static inline float to_float(float value) { return value; }
static inline float to_float(BFloat16 value) {
    const uint32_t bits = (uint32_t)value.bits << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// The value as it will be read back from memory of that type.
static inline Floats as_stored(const float*, Floats values) { return values; }
static inline Floats as_stored(const BFloat16*, Floats values) {
    BFloat16 lanes[LANES];
    store(lanes, values);
    return load(lanes);
}

#define SPECDEC_FOLD(values, COMBINE)                                                                     \
    values = COMBINE(values, __builtin_shufflevector(values, values, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, \
                                                     5, 6, 7));                                           \
    values = COMBINE(values, __builtin_shufflevector(values, values, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, \
                                                     10, 11));                                            \
    values = COMBINE(values, __builtin_shufflevector(values, values, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, \
                                                     12, 13));                                            \
    values = COMBINE(values, __builtin_shufflevector(values, values, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, \
                                                     15, 14));


static inline Floats add(Floats a, Floats b) { return a + b; }
static inline Floats maximum(Floats a, Floats b) { return choose(a > b, a, b); }

static inline float sum(Floats values) {
    SPECDEC_FOLD(values, add)
    return values[0];
}

static inline float largest(Floats values) {
    SPECDEC_FOLD(values, maximum)
    return values[0];
}

// e^x to about 2 ulp; 0 below -87, infinity above 88, NaN for NaN. Cody and Waite's reduction.
static inline Floats exponential(Floats x) {
    const Floats clamped = choose(x < -87.0f, splat(-87.0f), choose(x > 88.0f, splat(88.0f), x));
    const Ints power = __builtin_convertvector(clamped * 1.44269504f + choose(clamped < 0, splat(-0.5f), splat(0.5f)), Ints);
    const Floats n = __builtin_convertvector(power, Floats);
    const Floats r = fused(n, splat(2.12194440e-4f), fused(n, splat(-0.693359375f), clamped));
    Floats p = splat(1.9875691500e-4f);
    for (const float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                                    5.0000001201e-1f})
        p = fused(p, r, splat(coefficient));
    p = fused(p, r * r, r) + 1.0f;
    Floats result = p * (Floats)((power + 127) << 23);
    result = choose(x < -87.0f, Floats{}, result);
    result = choose(x > 88.0f, splat(INFINITY), result);
    return choose(x != x, x, result);
}

}  // namespace specdec

// Calls FUNCTION<float>(...) or FUNCTION<BFloat16>(...): 0 and 1 are the codes of native/loading.py.
#define SPECDEC_BY_DTYPE(dtype, FUNCTION, ...) \
    ((dtype) == 0 ? FUNCTION<float>(__VA_ARGS__) : FUNCTION<specdec::BFloat16>(__VA_ARGS__))
