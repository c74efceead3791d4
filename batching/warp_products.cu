// Products of a warp on the tensor cores, for attention of up to 8 query heads over 16 columns at once.
//
// A product adds a [16, inner] times b [inner, 8] to a [16, 8] of floats. Lane 4 * g + t holds, of the result, rows g
// and g + 8, columns 2t and 2t + 1, as {(g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)}. The inner dimension may
// be summed in any order, so what lanes load as 16 contiguous bytes serves as operands as it is. A word is 4 bytes:
// two numbers of 16 bits, or a float.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace mlxd {

constexpr int kLanes = 32;

__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Floats as sums of two that TF32 holds.
template <int N>
__device__ inline void divide(const uint32_t (&x)[N], uint32_t (&high)[N], uint32_t (&low)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    high[i] = x[i] & 0xffffe000u;
    low[i] = __float_as_uint(__uint_as_float(x[i]) - __uint_as_float(high[i]));
  }
}

// Three products instead of one keep the precision of float32.
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], float) {
  uint32_t a_high[4], a_low[4], b_high[2], b_low[2];
  divide(a, a_high, a_low);
  divide(b, b_high, b_low);
  mma_tf32(c, a_low, b_high);
  mma_tf32(c, a_high, b_low);
  mma_tf32(c, a_high, b_high);
}

// An 8 x 8 matrix of 16-bit numbers, two neighbours of a row a lane, transposed.
__device__ inline uint32_t transpose(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ inline uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ inline uint32_t pack(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Zeros where there is nothing: what lies there may be no number.
template <int WORDS>
__device__ inline void load(uint32_t (&words)[WORDS], const void* from, bool is_there) {
  static_assert(WORDS == 2 || WORDS == 4, "8 or 16 bytes");
  if constexpr (WORDS == 4) {
    const uint4 x = is_there ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
  } else {
    const uint2 x = is_there ? *static_cast<const uint2*>(from) : make_uint2(0, 0);
    words[0] = x.x, words[1] = x.y;
  }
}

// How values [16 columns, dims] and weights [16 columns, 8 heads] become the operands of a product [dims, heads].
// Each lane loads the same WORDS words of 4 of the columns: dimensions 2i and 2i + 1 of those, counted within the
// words, are rows g and g + 8 of result i.
template <typename T>
struct Weighing {
  // Which column lane t loads as its i-th.
  static __device__ int column(int i, int t) { return 2 * t + (i & 1) + 8 * (i >> 1); }

  // Weights as products left them, [columns, heads], made right operands.
  static __device__ void turn(const float (&weights)[4], int g, int t, uint32_t (&turned)[4]) {
    turned[0] = transpose(pack(weights[0], weights[1], T()));
    turned[1] = transpose(pack(weights[2], weights[3], T()));
  }

  template <int WORDS, int N>
  static __device__ void add(float (&out)[N][4], int first, const uint32_t (&v)[4][WORDS],
                             const uint32_t (&turned)[4]) {
    const uint32_t b[2] = {turned[0], turned[1]};
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      const uint32_t a[4] = {__byte_perm(v[0][i], v[1][i], 0x5410), __byte_perm(v[0][i], v[1][i], 0x7632),
                             __byte_perm(v[2][i], v[3][i], 0x5410), __byte_perm(v[2][i], v[3][i], 0x7632)};
      mma(out[first + i], a, b, T());
    }
  }
};

template <>
struct Weighing<float> {
  static __device__ int column(int i, int t) { return t + 4 * i; }

  static __device__ void turn(const float (&weights)[4], int g, int t, uint32_t (&turned)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int lane = 4 * (t + 4 * (i & 1)) + g / 2;
      const float even = __shfl_sync(~0u, weights[i & 2], lane), odd = __shfl_sync(~0u, weights[(i & 2) + 1], lane);
      turned[i] = __float_as_uint(g & 1 ? odd : even);
    }
  }

  template <int WORDS, int N>
  static __device__ void add(float (&out)[N][4], int first, const uint32_t (&v)[4][WORDS],
                             const uint32_t (&turned)[4]) {
#pragma unroll
    for (int i = 0; i < WORDS / 2; i++) {
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const uint32_t a[4] = {v[j][2 * i], v[j][2 * i + 1], v[j + 1][2 * i], v[j + 1][2 * i + 1]};
        const uint32_t b[2] = {turned[j], turned[j + 1]};
        mma(out[first + i], a, b, float());
      }
    }
  }
};

}  // namespace mlxd
