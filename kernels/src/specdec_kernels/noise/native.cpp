// The words of Philox4x32-10 under the keys of tokens, each as a float of its own.
#include <cstdint>

namespace {

struct Words {
    uint32_t word[4];
};

Words philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t seed) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// Four tokens share a block of words.
const int64_t BLOCKS_OF_A_PART = 4096;

}  // namespace

// seed, index, position, stream: [rows]; out: [rows, columns]. ids: [rows, columns], whose rows lie `ids_stride`
// apart (0: all have the same), or null for the first ids of the vocabulary.
extern "C" void specdec_noise_words(const int64_t* seed, const int64_t* index, const int64_t* position,
                                    const int64_t* stream, const int64_t* ids, float* out, int64_t rows,
                                    int64_t columns, int64_t ids_stride, int threads) {
    const int64_t of_a_part = BLOCKS_OF_A_PART * (ids ? 1 : 4);
    const int64_t parts = (columns + of_a_part - 1) / of_a_part;
#pragma omp parallel for num_threads(threads) if (rows * parts > 1 && threads > 1)
    for (int64_t part = 0; part < rows * parts; ++part) {
        const int64_t row = part / parts, first = part % parts * of_a_part;
        const int64_t last = first + of_a_part < columns ? first + of_a_part : columns;
        const uint32_t c1 = (uint32_t)position[row], c2 = (uint32_t)index[row], c3 = (uint32_t)stream[row];
        const uint64_t key = (uint64_t)seed[row];
        float* to = out + row * columns;
        if (ids) {
            const int64_t* from = ids + row * ids_stride;
            for (int64_t i = first; i < last; ++i)
                to[i] = (float)philox((uint32_t)(from[i] >> 2), c1, c2, c3, key).word[from[i] & 3];
        } else {
            for (int64_t i = first; i < last; i += 4) {
                const Words words = philox((uint32_t)(i >> 2), c1, c2, c3, key);
                for (int64_t lane = 0; lane < 4 && i + lane < last; ++lane) to[i + lane] = (float)words.word[lane];
            }
        }
    }
}
