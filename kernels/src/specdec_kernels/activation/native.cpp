// Gated activations.
#include "../native/vector.h"

using namespace specdec;

namespace {

struct Silu {
    static Floats of(Floats x) { return x / (exponential(-x) + 1.0f); }
};

struct GeluTanh {
    static Floats of(Floats x) {
        // 0.5 x (1 + tanh u) = x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
        const Floats u = (x + x * x * x * 0.044715f) * 0.7978845608f;
        return x / (exponential(u * -2.0f) + 1.0f);
    }
};

// The activation is rounded to T before the product, as torch's two operations do.
template <typename T, typename Activation>
void gated(const void* x, void* out, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; ++r) {
        const T* gate = (const T*)x + r * 2 * size;
        const T* up = gate + size;
        T* to = (T*)out + r * size;
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            store(to + i, as_stored(to, Activation::of(load(gate + i))) * load(up + i));
        if (i < size) {
            const int64_t rest = size - i;
            store_some(to + i, as_stored(to, Activation::of(load_some(gate + i, rest))) * load_some(up + i, rest),
                       rest);
        }
    }
}

template <typename T>
void silu(const void* x, void* out, int64_t rows, int64_t size, int threads) {
    gated<T, Silu>(x, out, rows, size, threads);
}

template <typename T>
void gelu_tanh(const void* x, void* out, int64_t rows, int64_t size, int threads) {
    gated<T, GeluTanh>(x, out, rows, size, threads);
}

}  // namespace

extern "C" void specdec_silu_and_mul(int dtype, const void* x, void* out, int64_t rows, int64_t size, int threads) {
    SPECDEC_BY_DTYPE(dtype, silu, x, out, rows, size, threads);
}

extern "C" void specdec_gelu_tanh_and_mul(int dtype, const void* x, void* out, int64_t rows, int64_t size,
                                          int threads) {
    SPECDEC_BY_DTYPE(dtype, gelu_tanh, x, out, rows, size, threads);
}
