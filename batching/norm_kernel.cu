// The sum of two arrays and its RMS norm along their last axis, in one pass: a block computes a row.

namespace mlxd {

constexpr int kLanes = 32;

// Numbers that lie side by side, read and written at once as far as 16 bytes go.
template <typename T, int COUNT>
struct alignas(COUNT * sizeof(T) < 16 ? COUNT * sizeof(T) : 16) Numbers {
  T at[COUNT];
};

template <int COUNT, typename T>
__device__ inline Numbers<T, COUNT> load(const T* from, int64_t stride) {
  using Together = Numbers<T, COUNT>;
  if (stride == 1 && reinterpret_cast<size_t>(from) % alignof(Together) == 0) {
    return *reinterpret_cast<const Together*>(from);
  }
  Together numbers;
#pragma unroll
  for (int i = 0; i < COUNT; i++) numbers.at[i] = from[i * stride];
  return numbers;
}

// Where a row begins in an array of any strides; rows are counted through all axes but the last.
template <typename Shape, typename Strides>
__device__ inline int64_t row_begin(int row, const Shape& shape, const Strides& strides, int ndim) {
  int64_t begin = 0;
  for (int axis = ndim - 2; axis >= 0; axis--) {
    begin += row % shape[axis] * strides[axis];
    row /= shape[axis];
  }
  return begin;
}

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

// grid: (rows), THREADS threads a block.
//
// first, second: rows of DIM numbers.  total: [rows, DIM], their sum as T has it.
// weight: DIM numbers.  normed: [rows, DIM], of the sum as T has it, rounded before it is multiplied by the weight.
template <typename T, typename W, int DIM, int THREADS>
__device__ void add_and_norm(const T* first, int64_t first_stride, const T* second, int64_t second_stride,
                             const W* weight, int64_t weight_stride, float eps, T* total, W* normed) {
  constexpr int kTogether = 16 / sizeof(T);
  constexpr int kCount = DIM % kTogether == 0 ? kTogether : 1;
  constexpr int kRounds = (DIM + THREADS * kCount - 1) / (THREADS * kCount);
  const int begin = threadIdx.x * kCount;
  const size_t row = static_cast<size_t>(blockIdx.x) * DIM;

  Numbers<T, kCount> sums[kRounds];
  Numbers<W, kCount> weights[kRounds];  // read beside the rest: a row takes as long as its loads take in turn
  float squares = 0;
#pragma unroll
  for (int round = 0; round < kRounds; round++) {
    const int dim = begin + round * THREADS * kCount;
    if (dim >= DIM) continue;
    const auto a = load<kCount>(first + dim * first_stride, first_stride);
    const auto b = load<kCount>(second + dim * second_stride, second_stride);
    weights[round] = load<kCount>(weight + dim * weight_stride, weight_stride);
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      const T sum = static_cast<T>(static_cast<float>(a.at[i]) + static_cast<float>(b.at[i]));
      const float number = static_cast<float>(sum);
      sums[round].at[i] = sum;
      squares += number * number;
    }
    *reinterpret_cast<Numbers<T, kCount>*>(total + row + dim) = sums[round];
  }
  const float factor = rsqrtf(block_sum<THREADS>(squares) / DIM + eps);
#pragma unroll
  for (int round = 0; round < kRounds; round++) {
    const int dim = begin + round * THREADS * kCount;
    if (dim >= DIM) continue;
    Numbers<W, kCount> result;
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      const W number = static_cast<W>(static_cast<float>(sums[round].at[i]) * factor);
      result.at[i] = static_cast<W>(static_cast<float>(number) * static_cast<float>(weights[round].at[i]));
    }
    *reinterpret_cast<Numbers<W, kCount>*>(normed + row + dim) = result;
  }
}

}  // namespace mlxd
