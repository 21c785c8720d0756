// Storing keys and values in the slots of a paged cache.
#include <cstdint>
#include <cstring>

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
