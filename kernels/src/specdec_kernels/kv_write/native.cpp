// Storing keys and values in the slots of a paged cache, on the way from a fused projection rotating them.
#include "../native/vector.h"
#include "../rotary/pairs.h"

using namespace specdec;

// Row t of `key` and `value` (bytes apart: key_stride, value_stride; bytes long: key_bytes,
// value_bytes) goes to slot slots[t] of the caches.
extern "C" void specdec_write_kv(const char* key, const char* value, char* key_cache, char* value_cache,
                                 const int64_t* slots, int64_t tokens, int64_t key_stride, int64_t value_stride,
                                 int64_t key_bytes, int64_t value_bytes) {
    for (int64_t t = 0; t < tokens; ++t) {
        std::memcpy(key_cache + slots[t] * key_bytes, key + t * key_stride, key_bytes);
        std::memcpy(value_cache + slots[t] * value_bytes, value + t * value_stride, value_bytes);
    }
}

namespace {

template <typename T>
void write_rows(const void* from, E4M3* cache, const int64_t* slots, int64_t tokens, int64_t stride, int64_t width) {
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < width; i += LANES) {
            const int64_t count = width - i < LANES ? width - i : LANES;
            store_some(cache + slots[t] * width + i, load_some((const T*)from + t * stride + i, count), count);
        }
}

template <typename T>
void write_kv8(const void* key, const void* value, void* key_cache, void* value_cache, const int64_t* slots,
               int64_t tokens, int64_t key_stride, int64_t value_stride, int64_t key_width, int64_t value_width) {
    write_rows<T>(key, (E4M3*)key_cache, slots, tokens, key_stride, key_width);
    write_rows<T>(value, (E4M3*)value_cache, slots, tokens, value_stride, value_width);
}

}  // namespace

// The same into caches of float8_e4m3fn; strides and widths in elements.
extern "C" void specdec_write_kv8(int dtype, const void* key, const void* value, void* key_cache, void* value_cache,
                                  const int64_t* slots, int64_t tokens, int64_t key_stride, int64_t value_stride,
                                  int64_t key_width, int64_t value_width) {
    SPECDEC_BY_DTYPE(dtype, write_kv8, key, value, key_cache, value_cache, slots, tokens, key_stride, value_stride,
                     key_width, value_width);
}

namespace {

template <typename T>
void rotate_and_write(const void* heads, const float* cos, const float* sin, void* query, void* key_cache,
                      void* value_cache, const int64_t* slots, int64_t tokens, int64_t num_heads, int64_t kv_heads,
                      int64_t dim, int64_t half) {
    for (int64_t t = 0; t < tokens; ++t) {
        const T* from = (const T*)heads + t * (num_heads + 2 * kv_heads) * dim;
        const float *c = cos + t * half, *s = sin + t * half;
        for (int64_t h = 0; h < num_heads; ++h, from += dim)
            rotate_head(from, (T*)query + (t * num_heads + h) * dim, c, s, dim, half);
        for (int64_t h = 0; h < kv_heads; ++h, from += dim)
            rotate_head(from, (T*)key_cache + (slots[t] * kv_heads + h) * dim, c, s, dim, half);
        std::memcpy((T*)value_cache + slots[t] * kv_heads * dim, from, kv_heads * dim * sizeof(T));
    }
}

}  // namespace

// heads: [tokens, num_heads + 2 kv_heads, dim], queries, keys and values side by side.
extern "C" void specdec_rotate_and_write(int dtype, const void* heads, const float* cos, const float* sin, void* query,
                                         void* key_cache, void* value_cache, const int64_t* slots, int64_t tokens,
                                         int64_t num_heads, int64_t kv_heads, int64_t dim, int64_t half) {
    SPECDEC_BY_DTYPE(dtype, rotate_and_write, heads, cos, sin, query, key_cache, value_cache, slots, tokens,
                     num_heads, kv_heads, dim, half);
}
