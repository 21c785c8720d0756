// RMS normalisation, with the addition to the residual stream before it.
#include "../native/vector.h"

using namespace specdec;

namespace {

template <typename T>
void normalize(const T* x, const T* weight, T* out, int64_t size, float eps) {
    Floats squares = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const Floats v = load(x + i);
        squares = fused(v, v, squares);
    }
    if (i < size) {
        const Floats v = load_some(x + i, size - i);
        squares = fused(v, v, squares);
    }
    const Floats factor = splat(1.0f / std::sqrt(sum(squares) / size + eps));
    for (i = 0; i + LANES <= size; i += LANES) store(out + i, load(x + i) * factor * load(weight + i));
    if (i < size)
        store_some(out + i, load_some(x + i, size - i) * factor * load_some(weight + i, size - i), size - i);
}

// x: [rows, groups, size], of which `row_stride` is free and the rest contiguous.
template <typename T>
void rms_norm(const void* x, const void* weight, void* out, int64_t rows, int64_t row_stride, int64_t groups,
              int64_t size, float eps) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t g = 0; g < groups; ++g)
            normalize((const T*)x + r * row_stride + g * size, (const T*)weight,
                      (T*)out + (r * groups + g) * size, size, eps);
}

template <typename T>
void add_rms_norm(const void* x, const void* residual, const void* weight, void* out, void* total, int64_t rows,
                  int64_t size, float eps) {
    for (int64_t r = 0; r < rows; ++r) {
        const T* a = (const T*)x + r * size;
        const T* b = (const T*)residual + r * size;
        T* s = (T*)total + r * size;
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) store(s + i, load(b + i) + load(a + i));
        if (i < size) store_some(s + i, load_some(b + i, size - i) + load_some(a + i, size - i), size - i);
        normalize(s, (const T*)weight, (T*)out + r * size, size, eps);
    }
}

}  // namespace

extern "C" void specdec_rms_norm(int dtype, const void* x, const void* weight, void* out, int64_t rows,
                                 int64_t row_stride, int64_t groups, int64_t size, float eps) {
    SPECDEC_BY_DTYPE(dtype, rms_norm, x, weight, out, rows, row_stride, groups, size, eps);
}

extern "C" void specdec_add_rms_norm(int dtype, const void* x, const void* residual, const void* weight, void* out,
                                     void* total, int64_t rows, int64_t size, float eps) {
    SPECDEC_BY_DTYPE(dtype, add_rms_norm, x, residual, weight, out, total, rows, size, eps);
}
