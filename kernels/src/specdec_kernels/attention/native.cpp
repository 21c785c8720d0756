// Attention over a paged cache, in place.
//
// A query goes through the keys in tiles of 64 positions, from position 0 up, with a running
// maximum and sum (Dao et al., arXiv 2205.14135). What it does in a tile depends on its own position
// alone, so its bits do not depend on the queries computed beside it. Tokens of a row that see one
// stretch of keys share a tile's loads; the node of a tree, whose last keys lie in scratch slots of
// its own, stands alone.
#include <algorithm>
#include <vector>

#include "../native/vector.h"

using namespace specdec;

namespace {

constexpr int64_t PARTS = 4, KEYS = PARTS * LANES;  // positions of a tile, by sixteens
constexpr int64_t MOST_TOKENS = 16;  // that share a tile's loads
constexpr int64_t MOST_GROUP = 64;

struct Step {
    const void *query, *key_cache, *value_cache;
    const int64_t *rows, *base, *extra, *table;
    void* out;
    int64_t tokens, query_stride, num_heads, kv_heads, key_dim, value_dim, block_size, max_blocks, levels, first,
        window;
    float scale;
};

// Tokens begin..end-1, all of one row.
struct Run {
    int64_t begin, end;
};

struct Sight {
    int64_t low, base, end;  // positions low..base-1 are logical slots, base..end-1 the path's
};

Sight sight(const Step& s, int64_t token, int64_t* path) {
    int64_t count = 0;
    for (int64_t e = 0; e < s.levels; ++e) {
        const int64_t slot = s.extra[token * s.levels + e];
        if (slot >= 0 && slot >= s.first) path[count++] = slot;
    }
    std::sort(path, path + count);
    const int64_t base = s.base[token], end = base + count;
    int64_t low = s.first;
    if (s.window > 0) low = std::max(low, end - s.window);
    return {low, base, end};
}

bool has_path(const Step& s, int64_t token) {
    for (int64_t e = 0; e < s.levels; ++e)
        if (s.extra[token * s.levels + e] >= 0) return true;
    return false;
}

std::vector<Run> runs(const Step& s, int threads) {
    // few enough tokens together that every thread has a share
    const int64_t share = s.tokens * s.kv_heads / (3 * threads);
    const int64_t most = std::max<int64_t>(1, std::min(MOST_TOKENS, share));
    std::vector<Run> found;
    for (int64_t t = 0; t < s.tokens;) {
        int64_t end = t + 1;
        if (!has_path(s, t))
            while (end < s.tokens && end - t < most && s.rows[end] == s.rows[t] && !has_path(s, end)) ++end;
        found.push_back({t, end});
        t = end;
    }
    return found;
}

// Rows of sixteen floats into columns: four rounds of exchanging halves.
inline void transpose(Floats (&m)[LANES]) {
    Floats t[LANES];
#define EXCHANGE(FROM, TO, STEP, LOW, HIGH)             \
    for (int i = 0; i < LANES; ++i)                     \
        if (!(i & STEP)) {                              \
            TO[i] = __builtin_shufflevector LOW;        \
            TO[i + STEP] = __builtin_shufflevector HIGH; \
        }
    EXCHANGE(m, t, 8, (m[i], m[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
             (m[i], m[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
    EXCHANGE(t, m, 4, (t[i], t[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
             (t[i], t[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
    EXCHANGE(m, t, 2, (m[i], m[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
             (m[i], m[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
    EXCHANGE(t, m, 1, (t[i], t[i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
             (t[i], t[i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#undef EXCHANGE
}

// Scores of N queries with the keys of a tile, which are laid out by dimension.
template <int N>
inline void score(const float* queries, int64_t dim, const Floats* keys, Floats* scores) {
    Floats sums[N][PARTS] = {};
    for (int64_t d = 0; d < dim; ++d)
        for (int n = 0; n < N; ++n)
            for (int part = 0; part < PARTS; ++part) sums[n][part] = fused(keys[d * PARTS + part], splat(queries[n * dim + d]), sums[n][part]);
    for (int n = 0; n < N; ++n)
        for (int part = 0; part < PARTS; ++part) scores[n * PARTS + part] = sums[n][part];
}

void score_all(const float* queries, int64_t count, int64_t dim, const Floats* keys, Floats* scores) {
    int64_t q = 0;
    for (; q + 4 <= count; q += 4) score<4>(queries + q * dim, dim, keys, scores + q * PARTS);
    switch (count - q) {
        case 1: return score<1>(queries + q * dim, dim, keys, scores + q * PARTS);
        case 2: return score<2>(queries + q * dim, dim, keys, scores + q * PARTS);
        case 3: return score<3>(queries + q * dim, dim, keys, scores + q * PARTS);
    }
}

// sums = sums * factor + weights . values for N queries, over the keys begin..end-1 of the tile.
template <int N, int CHUNKS>
inline void accumulate(Floats* sums, const float* weights, const float* factors, const Floats* values, int64_t chunks,
                       int64_t begin, int64_t end) {
    Floats local[N][CHUNKS];
    for (int n = 0; n < N; ++n)
        for (int c = 0; c < CHUNKS; ++c) local[n][c] = sums[n * chunks + c] * factors[n];
    for (int64_t k = begin; k < end; ++k)
        for (int n = 0; n < N; ++n)
            for (int c = 0; c < CHUNKS; ++c) local[n][c] = fused(values[k * chunks + c], splat(weights[n * KEYS + k]), local[n][c]);
    for (int n = 0; n < N; ++n)
        for (int c = 0; c < CHUNKS; ++c) sums[n * chunks + c] = local[n][c];
}

template <int N>
void accumulate_queries(Floats* sums, const float* weights, const float* factors, const Floats* values,
                        int64_t chunks, int64_t begin, int64_t end) {
    int64_t c = 0;
    for (; c + 4 <= chunks; c += 4) accumulate<N, 4>(sums + c, weights, factors, values + c, chunks, begin, end);
    for (; c < chunks; ++c) accumulate<N, 1>(sums + c, weights, factors, values + c, chunks, begin, end);
}

void accumulate_all(Floats* sums, const float* weights, const float* factors, const Floats* values, int64_t count,
                    int64_t chunks, int64_t begin, int64_t end) {
    int64_t q = 0;
    for (; q + 4 <= count; q += 4)
        accumulate_queries<4>(sums + q * chunks, weights + q * KEYS, factors + q, values, chunks, begin, end);
    sums += q * chunks, weights += q * KEYS, factors += q;
    switch (count - q) {
        case 1: return accumulate_queries<1>(sums, weights, factors, values, chunks, begin, end);
        case 2: return accumulate_queries<2>(sums, weights, factors, values, chunks, begin, end);
        case 3: return accumulate_queries<3>(sums, weights, factors, values, chunks, begin, end);
    }
}

// Keys of sixteen positions, one at each of `rows` (null: none, zeros), by dimension: to[d * PARTS].
template <typename C>
void lay_out(const C* const* rows, int64_t dim, Floats* to) {
    for (int64_t d = 0; d < dim; d += LANES) {
        Floats square[LANES];
        for (int k = 0; k < LANES; ++k) square[k] = rows[k] ? load(rows[k] + d) : Floats{};
        transpose(square);
        for (int i = 0; i < LANES; ++i) to[(d + i) * PARTS] = square[i];
    }
}

// Two dimensions travel together, which halves the work.
void lay_out(const BFloat16* const* rows, int64_t dim, Floats* to) {
    for (int64_t d = 0; d < dim; d += 2 * LANES) {
        const int64_t size = (dim - d < 2 * LANES ? dim - d : 2 * LANES) * sizeof(BFloat16);
        Floats square[LANES] = {};
        for (int k = 0; k < LANES; ++k) {
            if (!rows[k]) continue;
            if (size == sizeof(Floats))
                std::memcpy(&square[k], rows[k] + d, sizeof(Floats));
            else
                std::memcpy(&square[k], rows[k] + d, size);
        }
        transpose(square);
        for (int64_t i = 0; i < size / 4; ++i) {
            to[(d + 2 * i) * PARTS] = (Floats)((Words)square[i] << 16);
            to[(d + 2 * i + 1) * PARTS] = (Floats)((Words)square[i] & 0xffff0000);
        }
    }
}

// One run of tokens with one KV head; keys and values are stored as C.
template <typename T, typename C>
void attend(const Step& s, Run run, int64_t kv_head, std::vector<Floats>& memory, std::vector<int64_t>& path) {
    const int64_t tokens = run.end - run.begin, group = s.num_heads / s.kv_heads, count = tokens * group;
    const int64_t key_chunks = s.key_dim / LANES, value_chunks = s.value_dim / LANES;
    memory.assign(count * (key_chunks + value_chunks + PARTS + 1) + KEYS * (key_chunks + value_chunks), Floats{});
    Floats* sums = memory.data();                       // [count, value_chunks]
    Floats* totals = sums + count * value_chunks;             // [count], by lane
    Floats* scores = totals + count;                          // [count, PARTS]
    Floats* keys = scores + count * PARTS;                    // [key_dim, PARTS]
    Floats* values = keys + KEYS * key_chunks;                // [KEYS, value_chunks]
    float* queries = (float*)(values + KEYS * value_chunks);  // [count, key_dim], by token, then head
    float maxima[MOST_TOKENS * MOST_GROUP], weights[MOST_GROUP * KEYS], factors[MOST_GROUP];
    Sight sights[MOST_TOKENS];
    int64_t lowest = INT64_MAX, highest = 0;
    for (int64_t t = 0; t < tokens; ++t) {
        sights[t] = sight(s, run.begin + t, path.data());
        if (sights[t].low < sights[t].end) {
            lowest = std::min(lowest, sights[t].low);
            highest = std::max(highest, sights[t].end);
        }
        const T* from = (const T*)s.query + (run.begin + t) * s.query_stride + kv_head * group * s.key_dim;
        float* to = queries + t * group * s.key_dim;
        for (int64_t i = 0; i < group * s.key_dim; i += LANES) store(to + i, load(from + i) * s.scale);
    }
    for (int64_t q = 0; q < count; ++q) maxima[q] = -INFINITY;

    const int64_t* blocks = s.table + s.rows[run.begin] * s.max_blocks;
    for (int64_t tile = lowest / KEYS * KEYS; tile < highest; tile += KEYS) {
        const int64_t begin = std::max(tile, lowest), end = std::min(tile + KEYS, highest);
        int64_t slots[KEYS];
        for (int64_t p = begin; p < end; ++p) {
            // a run of several tokens has no path: its positions are logical slots, whoever sees them
            const int64_t logical = tokens > 1 || p < sights[0].base ? p : path[p - sights[0].base];
            slots[p - tile] = blocks[logical / s.block_size] * s.block_size + logical % s.block_size;
        }
        for (int64_t part = 0; part < PARTS; ++part) {
            const C* rows[LANES];
            for (int64_t k = 0; k < LANES; ++k) {
                const int64_t p = tile + part * LANES + k;
                rows[k] = p < begin || p >= end ? nullptr
                                                : (const C*)s.key_cache +
                                                      (slots[p - tile] * s.kv_heads + kv_head) * s.key_dim;
            }
            lay_out(rows, s.key_dim, keys + part);
        }
        for (int64_t p = begin; p < end; ++p)
            for (int64_t c = 0; c < value_chunks; ++c)
                values[(p - tile) * value_chunks + c] =
                    load((const C*)s.value_cache + (slots[p - tile] * s.kv_heads + kv_head) * s.value_dim + c * LANES);
        // Tokens are in the order of their positions: those that end before the tile come first.
        score_all(queries, count, s.key_dim, keys, scores);
        for (int64_t t = 0; t < tokens; ++t) {
            const int64_t from = std::max(tile, sights[t].low) - tile;
            const int64_t to = std::min(tile + KEYS, sights[t].end) - tile;
            if (from >= to) continue;
            for (int64_t g = 0; g < group; ++g) {
                const int64_t q = t * group + g;
                float* of_query = weights + g * KEYS;
                for (int64_t part = 0; part < PARTS; ++part) store(of_query + part * LANES, scores[q * PARTS + part]);
                for (int64_t k = 0; k < from; ++k) of_query[k] = -INFINITY;
                for (int64_t k = to; k < KEYS; ++k) of_query[k] = -INFINITY;
                Floats masked[PARTS], most = splat(-INFINITY);
                for (int64_t part = 0; part < PARTS; ++part) {
                    masked[part] = load(of_query + part * LANES);
                    most = maximum(masked[part], most);
                }
                const float highest_score = std::max(maxima[q], largest(most));
                // all seen so far is -inf: then there is nothing to scale, and no NaN to make
                const float shift = highest_score == -INFINITY ? 0.0f : highest_score;
                factors[g] = maxima[q] == highest_score ? 1.0f : exponential(splat(maxima[q] - shift))[0];
                maxima[q] = highest_score;
                totals[q] *= factors[g];
                for (int64_t part = 0; part < PARTS; ++part) {
                    const Floats exponents = exponential(masked[part] - shift);
                    store(of_query + part * LANES, exponents);
                    totals[q] += exponents;
                }
            }
            accumulate_all(sums + t * group * value_chunks, weights, factors, values, group, value_chunks, from, to);
        }
    }
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t g = 0; g < group; ++g) {
            const int64_t q = t * group + g;
            T* to = (T*)s.out + ((run.begin + t) * s.num_heads + kv_head * group + g) * s.value_dim;
            const bool blind = sights[t].low >= sights[t].end;
            const float total = sum(totals[q]);
            for (int64_t c = 0; c < value_chunks; ++c)
                store(to + c * LANES, blind ? Floats{} : sums[q * value_chunks + c] / total);
        }
}

template <typename T, typename C>
void attend_all(const Step& s, int threads) {
    const std::vector<Run> all = runs(s, threads);
    const int64_t items = (int64_t)all.size() * s.kv_heads;
#pragma omp parallel num_threads(threads) if (threads > 1 && items > 1)
    {
        std::vector<Floats> memory;
        std::vector<int64_t> path(s.levels + 1);
#pragma omp for schedule(dynamic)
        for (int64_t item = items - 1; item >= 0; --item)  // the longest of a prompt first
            attend<T, C>(s, all[item / s.kv_heads], item % s.kv_heads, memory, path);
    }
}

template <typename T>
void attend_step(const Step& s, int float8, int threads) {
    if (float8)
        attend_all<T, E4M3>(s, threads);
    else
        attend_all<T, T>(s, threads);
}

}  // namespace

// float8: keys and values are stored in it, else as the queries.
extern "C" void specdec_paged_attention(int dtype, int float8, const void* query, const void* key_cache, const void* value_cache,
                                        const int64_t* rows, const int64_t* base, const int64_t* extra,
                                        const int64_t* table, void* out, int64_t tokens,
                                        int64_t query_stride, int64_t num_heads, int64_t kv_heads, int64_t key_dim,
                                        int64_t value_dim, int64_t block_size, int64_t max_blocks, int64_t levels,
                                        int64_t first, int64_t window, float scale, int threads) {
    const Step step{query, key_cache, value_cache, rows, base, extra, table, out, tokens, query_stride,
                    num_heads, kv_heads, key_dim, value_dim, block_size, max_blocks, levels, first, window, scale};
    SPECDEC_BY_DTYPE(dtype, attend_step, step, float8, threads);
}
