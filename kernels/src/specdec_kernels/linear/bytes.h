// Activations as bytes, a scale for each token and group of inputs, and the product of bytes.
//
// Sums of integers are exact in any order. Needs the dot product of bytes of AVX-512 VNNI or AVX-VNNI.
#pragma once
#include <vector>

#include "../native/vector.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#include <immintrin.h>
#define SPECDEC_INT8 1

namespace specdec {

typedef int8_t Bytes __attribute__((vector_size(LANES)));

// sums[i] += dot of the four unsigned bytes of word i of the weights and the four signed ones of x.
inline Ints dot(Ints sums, Words weights, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
#ifdef __AVX512VNNI__
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(four));
#else
    __m256i halves[2], bytes[2];
    std::memcpy(halves, &sums, sizeof sums);
    std::memcpy(bytes, &weights, sizeof weights);
    for (int h = 0; h < 2; ++h)
        halves[h] = _mm256_dpbusd_avx_epi32(halves[h], bytes[h], _mm256_set1_epi32(four));
    std::memcpy(&sums, halves, sizeof sums);
    return sums;
#endif
}

inline Words load_words(const uint8_t* from) {
    Words words;
    std::memcpy(&words, from, sizeof words);
    return words;
}

struct Quantized {
    std::vector<int8_t> values;  // [rows, inputs], inputs padded to whole groups
    std::vector<float> scales;   // [rows, groups]
    std::vector<int32_t> sums;   // [rows, groups] of the group's values
};

// Not finite: the scale becomes NaN, and so does everything made of it.
template <int64_t GROUP, typename T>
void quantize(const T* x, int64_t inputs, int8_t* values, float* scales, int32_t* sums) {
    for (int64_t g = 0; g * GROUP < inputs; ++g) {
        Floats parts[GROUP / LANES];
        Floats magnitude = {}, fault = {};
        for (int64_t i = 0; i < GROUP / LANES; ++i) {
            const int64_t at = g * GROUP + i * LANES, rest = inputs - at;
            parts[i] = rest <= 0 ? Floats{} : load_some(x + at, rest < LANES ? rest : LANES);
            const Floats absolute = choose(parts[i] < 0, -parts[i], parts[i]);
            magnitude = choose(absolute > magnitude, absolute, magnitude);
            fault += parts[i] - parts[i];
        }
        const float most = largest(magnitude), inverse = most > 0 ? 127.0f / most : 0.0f;
        Ints total = {};
        for (int64_t i = 0; i < GROUP / LANES; ++i) {
            // adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even
            const Floats rounded = (parts[i] * inverse + 12582912.0f) - 12582912.0f;
            const Ints whole = __builtin_convertvector(rounded, Ints);
            total += whole;
            const Bytes bytes = __builtin_convertvector(whole, Bytes);
            std::memcpy(values + g * GROUP + i * LANES, &bytes, sizeof bytes);
        }
        int32_t sum_of_group = 0;
        for (int lane = 0; lane < LANES; ++lane) sum_of_group += total[lane];
        sums[g] = sum_of_group;
        scales[g] = most / 127.0f + sum(fault);
    }
}

}  // namespace specdec
#endif
