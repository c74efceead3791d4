// The sum of two arrays and its RMS norm along their last axis, in one pass: a block computes a row.

namespace mlxd {

constexpr int kLanes = 32;

// Numbers that lie side by side, read and written at once as far as 16 bytes go.
template <typename T, int COUNT>
struct alignas(COUNT * sizeof(T) < 16 ? COUNT * sizeof(T) : 16) Numbers {
  T at[COUNT];
};

// Where a row begins in an array of any strides; rows are counted through all axes but the last.
template <typename Shape, typename Strides>
__device__ inline int64_t row_begin(int row, const Shape& shape, const Strides& strides, int ndim) {
  int64_t begin = 0;
#pragma unroll 1
  for (int axis = ndim - 2; axis > 0; axis--) {
    if (shape[axis] == 1) continue;  // as in a decode step, which so divides nothing
    begin += row % shape[axis] * strides[axis];
    row /= shape[axis];
  }
  return begin + row * strides[0];
}

// A row of numbers at any stride.
template <typename T>
struct Row {
  const T* numbers;
  int64_t stride;

  template <int COUNT>
  __device__ bool lies_together() const {
    return stride == 1 && reinterpret_cast<size_t>(numbers) % alignof(Numbers<T, COUNT>) == 0;
  }

  template <int COUNT, bool TOGETHER>
  __device__ Numbers<T, COUNT> load(int dim) const {
    Numbers<T, COUNT> found;
    if constexpr (TOGETHER) {
      found = *reinterpret_cast<const Numbers<T, COUNT>*>(numbers + dim);
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; i++) found.at[i] = numbers[(dim + i) * stride];
    }
    return found;
  }
};

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

// Each thread gets the sum over all of the block, to the bit the same.
template <int THREADS>
__device__ inline float block_sum(float x) {
  constexpr int kWarps = THREADS / kLanes;
  static_assert(THREADS % kLanes == 0 && kWarps <= kLanes, "whole warps, and one of them adds up all");
  const int lane = threadIdx.x % kLanes;
  __shared__ float of_warps[kWarps];
  x = warp_sum(x);
  if (lane == 0) of_warps[threadIdx.x / kLanes] = x;
  __syncthreads();
  return warp_sum(lane < kWarps ? of_warps[lane] : 0.0f);
}

// One thread's numbers of a row of DIM: COUNT in each round of the block.
template <typename T, typename W, int DIM, int THREADS, int COUNT>
struct Share {
  static constexpr int kRounds = (DIM + THREADS * COUNT - 1) / (THREADS * COUNT);

  Numbers<T, COUNT> sums[kRounds];
  Numbers<W, COUNT> weights[kRounds];

  static __device__ int dim(int round) { return (round * THREADS + static_cast<int>(threadIdx.x)) * COUNT; }

  // Loads of all three are on their way at once: a row takes as long as what it waits for.
  template <bool TOGETHER>
  __device__ void load(Row<T> first, Row<T> second, Row<W> weight) {
#pragma unroll
    for (int round = 0; round < kRounds; round++) {
      if (dim(round) >= DIM) continue;
      const auto a = first.template load<COUNT, TOGETHER>(dim(round));
      const auto b = second.template load<COUNT, TOGETHER>(dim(round));
      weights[round] = weight.template load<COUNT, TOGETHER>(dim(round));
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        sums[round].at[i] = static_cast<T>(static_cast<float>(a.at[i]) + static_cast<float>(b.at[i]));
      }
    }
  }

  __device__ float squares() const {
    float total = 0;
#pragma unroll
    for (int round = 0; round < kRounds; round++) {
      if (dim(round) >= DIM) continue;
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        const float number = static_cast<float>(sums[round].at[i]);
        total += number * number;
      }
    }
    return total;
  }

  // As MLX does it, numbers are rounded before they are multiplied by the weight.
  __device__ void write(float factor, T* total, W* normed) const {
#pragma unroll
    for (int round = 0; round < kRounds; round++) {
      if (dim(round) >= DIM) continue;
      Numbers<W, COUNT> result;
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        const W number = static_cast<W>(static_cast<float>(sums[round].at[i]) * factor);
        result.at[i] = static_cast<W>(static_cast<float>(number) * static_cast<float>(weights[round].at[i]));
      }
      *reinterpret_cast<Numbers<T, COUNT>*>(total + dim(round)) = sums[round];
      *reinterpret_cast<Numbers<W, COUNT>*>(normed + dim(round)) = result;
    }
  }
};

// grid: (rows), THREADS threads a block.
//
// first, second: of DIM numbers.  total: [rows, DIM], their sum as T has it.
// weight: of DIM numbers.  normed: [rows, DIM], of the sum as T has it.
template <int DIM, int THREADS, typename T, typename W>
__device__ void add_and_norm(Row<T> first, Row<T> second, Row<W> weight, float eps, T* total, W* normed) {
  constexpr int kTogether = 16 / sizeof(T);
  constexpr int kCount = DIM % kTogether == 0 ? kTogether : 1;
  const size_t row = static_cast<size_t>(blockIdx.x) * DIM;
  Share<T, W, DIM, THREADS, kCount> mine;
  if (first.template lies_together<kCount>() && second.template lies_together<kCount>() &&
      weight.template lies_together<kCount>()) {
    mine.template load<true>(first, second, weight);
  } else {
    mine.template load<false>(first, second, weight);
  }
  const float factor = rsqrtf(block_sum<THREADS>(mine.squares()) / DIM + eps);
  mine.write(factor, total + row, normed + row);
}

}  // namespace mlxd
