// Sums of values weighted by attention, of 8 query heads, spread over a warp as its products leave them, and where they
// are written. Weights are powers of two, of scores times log2(e), relative to the largest one seen. Follows
// warp_products.cu.

namespace mlxd {

constexpr float kNothing = -1e30f;  // below any score; finite, so that differences are
constexpr float kLog2E = 1.4426950408889634f;

// Sums of weighted values over the columns seen, of 8 heads: N results of a product.
template <int N>
struct Sums {
  static constexpr int kFloats = 4 + 4 * N;

  float top[2], total[2];  // largest score and sum of weights, of heads 2t and 2t + 1
  float out[N][4];

  __device__ void clear() {
    top[0] = top[1] = kNothing;
    total[0] = total[1] = 0;
#pragma unroll
    for (int i = 0; i < 4 * N; i++) out[i / 4][i % 4] = 0;
  }

  __device__ void raise(const float (&next)[2]) {
    const float by[2] = {exp2f(top[0] - next[0]), exp2f(top[1] - next[1])};
#pragma unroll
    for (int h = 0; h < 2; h++) top[h] = next[h], total[h] *= by[h];
#pragma unroll
    for (int i = 0; i < 4 * N; i++) out[i / 4][i % 4] *= by[i & 1];
  }

  // Turns scores of 16 columns, one of which there must be, into their weights.
  __device__ void weigh(float (&scores)[4]) {
    float next[2] = {fmaxf(scores[0], scores[2]), fmaxf(scores[1], scores[3])};
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int x = 4; x < kLanes; x *= 2) next[h] = fmaxf(next[h], __shfl_xor_sync(~0u, next[h], x));
      next[h] = fmaxf(next[h], top[h]);
    }
    if (__any_sync(~0u, next[0] > top[0] || next[1] > top[1])) raise(next);
#pragma unroll
    for (int r = 0; r < 4; r++) scores[r] = exp2f(scores[r] - top[r & 1]);
    total[0] += scores[0] + scores[2];
    total[1] += scores[1] + scores[3];
  }

  // Until here each lane has summed the weights of its own columns.
  __device__ void gather_totals() {
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int x = 4; x < kLanes; x *= 2) total[h] += __shfl_xor_sync(~0u, total[h], x);
    }
  }

  __device__ void store(float* to) const {
#pragma unroll
    for (int h = 0; h < 2; h++) to[h * kLanes] = top[h], to[(2 + h) * kLanes] = total[h];
#pragma unroll
    for (int i = 0; i < 4 * N; i++) to[(4 + i) * kLanes] = out[i / 4][i % 4];
  }

  __device__ void add(const float* stored) {
    const float next[2] = {fmaxf(top[0], stored[0]), fmaxf(top[1], stored[kLanes])};
    const float by[2] = {exp2f(stored[0] - next[0]), exp2f(stored[kLanes] - next[1])};
    raise(next);
#pragma unroll
    for (int h = 0; h < 2; h++) total[h] += by[h] * stored[(2 + h) * kLanes];
#pragma unroll
    for (int i = 0; i < 4 * N; i++) out[i / 4][i % 4] += by[i & 1] * stored[(4 + i) * kLanes];
  }
};

// As few stores as there can be: N numbers fill at most 16 bytes, or a whole number of those.
template <typename T, int N>
__device__ inline void store(T* to, const float (&numbers)[N], float by) {
  constexpr int kTogether = N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
  struct alignas(kTogether * sizeof(T)) Together {
    T numbers[kTogether];
  };
#pragma unroll
  for (int i = 0; i < N; i += kTogether) {
    Together together;
#pragma unroll
    for (int j = 0; j < kTogether; j++) together.numbers[j] = static_cast<T>(numbers[i + j] * by);
    *reinterpret_cast<Together*>(to + i) = together;
  }
}

// Where sums become the attention itself, [rows, heads, value_dim]. sinks: a logit a head that takes weight alone.
template <typename T, typename Sink, bool SINKS>
struct Whole {
  T* out;
  const Sink* sinks;

  template <int N>
  __device__ void write(int row, int head, int num_heads, int dim, int value_dim, float top, float total,
                        const float (&numbers)[N]) const {
    float by = 1;
    if constexpr (SINKS) {
      const float sink = static_cast<float>(sinks[head]) * kLog2E, next = fmaxf(top, sink);
      by = exp2f(top - next);
      total = total * by + exp2f(sink - next);
    }
    store(out + (static_cast<size_t>(row) * num_heads + head) * value_dim + dim, numbers, by / total);
  }
};

// Where a part's sums go, [rows, heads, parts, value_dim], and its top and total, [rows, heads, parts, 2].
struct Part {
  float* sums;
  float* stats;

  template <int N>
  __device__ void write(int row, int head, int num_heads, int dim, int value_dim, float top, float total,
                        const float (&numbers)[N]) const {
    const size_t at = (static_cast<size_t>(row) * num_heads + head) * gridDim.x + blockIdx.x;
    if (dim == 0) stats[2 * at] = top, stats[2 * at + 1] = total;
    if (total == 0) return;  // nobody reads them
    store(sums + at * value_dim + dim, numbers, 1);
  }
};

}  // namespace mlxd
