// What a step computed of its own position: heads of queries, keys or values at any strides, rotated on their way to
// where they are read from. Follows warp_products.cu.

namespace mlxd {

// Numbers of a head go in pairs; this one leaves them as they are.
struct Unrotated {
  static __device__ int first(int pair) { return 2 * pair; }
  static __device__ int second(int pair) { return 2 * pair + 1; }
  __device__ void turn(int, int, float&, float&) const {}
};

// Rotary embedding of the first DIMS numbers of a head: pairs are neighbours, or DIMS / 2 apart.
template <int DIMS, int NEIGHBOURS>
struct Rotary {
  const float* turns;  // [rows, DIMS]: where a pair's numbers are, its cosine and its sine

  static __device__ int first(int pair) { return NEIGHBOURS || pair >= DIMS / 2 ? 2 * pair : pair; }
  static __device__ int second(int pair) {
    return NEIGHBOURS || pair >= DIMS / 2 ? 2 * pair + 1 : pair + DIMS / 2;
  }

  __device__ void turn(int row, int pair, float& x, float& y) const {
    if (pair >= DIMS / 2) return;
    const float* of_row = turns + static_cast<size_t>(row) * DIMS;
    const float cosine = of_row[first(pair)], sine = of_row[second(pair)];
    const float turned = x * cosine - y * sine;
    y = x * sine + y * cosine;
    x = turned;
  }
};

// [rows, heads, 1, dims] of numbers.
template <typename T, typename Rotation>
struct Heads {
  const T* numbers;
  int64_t row_stride, head_stride, stride;
  Rotation rotation;

  // `count` heads of a row as [count, DIM], by all threads of a block.
  template <int DIM>
  __device__ void copy(T* to, int row, int first_head, int count) const {
    for (int i = threadIdx.x; i < count * (DIM / 2); i += blockDim.x) {
      const int head = i / (DIM / 2), pair = i % (DIM / 2);
      const int a = rotation.first(pair), b = rotation.second(pair);
      const T* from = numbers + row * row_stride + (first_head + head) * head_stride;
      float x = static_cast<float>(from[a * stride]), y = static_cast<float>(from[b * stride]);
      rotation.turn(row, pair, x, y);
      to[head * DIM + a] = static_cast<T>(x), to[head * DIM + b] = static_cast<T>(y);
    }
  }
};

}  // namespace mlxd
