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
    const int turning = min(pair, DIMS / 2 - 1);
    const float* of_row = turns + static_cast<size_t>(row) * DIMS;
    const float cosine = of_row[first(turning)], sine = of_row[second(turning)];
    const float a = x * cosine - y * sine, b = x * sine + y * cosine;
    x = pair < DIMS / 2 ? a : x, y = pair < DIMS / 2 ? b : y;
  }
};

// A thread's share of up to COUNT heads of DIM numbers on their way to shared memory, of THREADS threads. They are read
// into registers without branches, so that all of a block's first reads are under way at once.
template <typename T, int DIM, int COUNT, int THREADS, typename Rotation>
struct Share {
  static constexpr int kMine = (COUNT * DIM / 2 + THREADS - 1) / THREADS;

  T numbers[kMine][2];

  static __device__ int head(int i) { return (threadIdx.x + i * THREADS) / (DIM / 2); }
  static __device__ int pair(int i) { return (threadIdx.x + i * THREADS) % (DIM / 2); }

  // to: [COUNT, DIM] in shared memory.
  __device__ void store(T* to) const {
#pragma unroll
    for (int i = 0; i < kMine; i++) {
      if (head(i) >= COUNT) break;
      T* of_head = to + head(i) * DIM;
      of_head[Rotation::first(pair(i))] = numbers[i][0], of_head[Rotation::second(pair(i))] = numbers[i][1];
    }
  }
};

// [rows, heads, 1, dims] of numbers.
template <typename T, typename Rotation>
struct Heads {
  const T* numbers;
  int64_t row_stride, head_stride, stride;
  Rotation rotation;

  // `count` heads of a row, rotated; the last of them over and over up to COUNT.
  template <int DIM, int COUNT, int THREADS>
  __device__ Share<T, DIM, COUNT, THREADS, Rotation> share(int row, int first_head, int count) const {
    Share<T, DIM, COUNT, THREADS, Rotation> mine;
#pragma unroll
    for (int i = 0; i < mine.kMine; i++) {
      const int pair = mine.pair(i);
      const T* from = numbers + row * row_stride + (first_head + min(mine.head(i), count - 1)) * head_stride;
      float x = static_cast<float>(from[rotation.first(pair) * stride]);
      float y = static_cast<float>(from[rotation.second(pair) * stride]);
      rotation.turn(row, pair, x, y);
      mine.numbers[i][0] = static_cast<T>(x), mine.numbers[i][1] = static_cast<T>(y);
    }
    return mine;
  }
};

}  // namespace mlxd
