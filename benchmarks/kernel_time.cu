// Time that the decode attention kernel takes on the GPU alone, without MLX's launch.
//
//   nvcc -O3 -std=c++17 -arch=native -I batching -o /tmp/kernel_time benchmarks/kernel_time.cu && /tmp/kernel_time
//
// 8 KV heads with 4 query heads each, bfloat16, pages of 64 in random order, more of them than a cache holds. A line:
// width, rows, columns, parts of a row, microseconds (median of 15 times 20 launches), GB/s of keys and values read.
// The first line is the rate at which a kernel that only reads goes through 4 GiB.

#include <algorithm>
#include <cstdlib>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#include "warp_products.cu"
#include "page_cells.cu"
#include "attention_kernel.cu"

using Number = __nv_bfloat16;

constexpr int kKvHeads = 8, kGroup = 4, kPage = 64, kWarpsOfBlock = 8, kShortest = 32, kCalls = 20;

template <int DIM>
struct Layer {
  using Cells = mlxd::Dense<Number, DIM>;
  const Number* queries;
  Cells new_keys, new_values, keys, values;
  const int32_t* table;
  const int32_t* last;
  int width;
  Number* out;
  float *sums, *stats;
};

template <int DIM, typename Result>
__device__ void attend(const Layer<DIM>& layer, Result result) {
  mlxd::attend<Number, kGroup, DIM, DIM, kPage, kWarpsOfBlock>(
      layer.queries, layer.new_keys, layer.new_values, layer.keys, layer.values, layer.table, layer.width, layer.last,
      0, kShortest, 0.1f, 0.0f, result);
}

template <int DIM>
__global__ void whole(Layer<DIM> layer) {
  attend(layer, mlxd::Whole<Number, Number, false>{layer.out, nullptr});
}

template <int DIM>
__global__ void part(Layer<DIM> layer) {
  attend(layer, mlxd::Part{layer.sums, layer.stats});
}

template <int DIM>
__global__ void join(Layer<DIM> layer, int parts) {
  mlxd::join<DIM>(layer.sums, layer.stats, parts, mlxd::Whole<Number, Number, false>{layer.out, nullptr});
}

__global__ void fill(Number* numbers, size_t count) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    numbers[i] = __float2bfloat16(float(uint32_t(i) * 2654435761u >> 16) / 32768.0f - 1.0f);
  }
}

__global__ void read(const uint4* words, size_t count, uint32_t* out) {
  uint32_t sum = 0;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    sum ^= words[i].x ^ words[i].y ^ words[i].z ^ words[i].w;
  }
  if (sum == 1) *out = sum;  // or nothing would be read
}

template <typename T>
T* device(size_t count) {
  T* memory = nullptr;
  if (cudaMalloc(&memory, count * sizeof(T)) != cudaSuccess) std::exit(1);
  return memory;
}

Number* numbers(size_t count) {
  Number* memory = device<Number>(count);
  fill<<<1024, 256>>>(memory, count);
  return memory;
}

int32_t* integers(const std::vector<int32_t>& values) {
  int32_t* memory = device<int32_t>(values.size());
  cudaMemcpy(memory, values.data(), values.size() * sizeof(int32_t), cudaMemcpyHostToDevice);
  return memory;
}

template <typename Launch>
float median_us(Launch launch) {
  cudaEvent_t begun, ended;
  cudaEventCreate(&begun), cudaEventCreate(&ended);
  std::vector<float> times;
  for (int repeat = 0; repeat < 16; repeat++) {
    float ms = 0;
    cudaEventRecord(begun);
    for (int i = 0; i < kCalls; i++) launch(i);
    cudaEventRecord(ended), cudaEventSynchronize(ended), cudaEventElapsedTime(&ms, begun, ended);
    if (repeat) times.push_back(1000 * ms / kCalls);
  }
  if (cudaGetLastError() != cudaSuccess) std::exit(1);
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

template <int DIM>
void measure(int rows, int columns, int parts) {
  const int width = columns / kPage, num_pages = rows * width;
  const size_t pool = size_t(num_pages) * kKvHeads * kPage * DIM, heads = size_t(rows) * kKvHeads * kGroup;
  std::vector<int32_t> table(num_pages), last(rows, columns - 1);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(0));
  const Layer<DIM> first{numbers(heads * DIM),  {numbers(heads * DIM)}, {numbers(heads * DIM)},       {}, {},
                         integers(table),       integers(last),         width,                        numbers(heads * DIM),
                         device<float>(heads * parts * DIM), device<float>(heads * parts * 2)};
  std::vector<Layer<DIM>> layers(1 + 400'000'000 / (4 * pool), first);
  for (auto& layer : layers) layer.keys = {numbers(pool)}, layer.values = {numbers(pool)};

  const dim3 grid(parts, kKvHeads, rows);
  const float us = median_us([&](int i) {
    const Layer<DIM>& layer = layers[i % layers.size()];
    if (parts == 1) {
      whole<DIM><<<grid, 32 * kWarpsOfBlock>>>(layer);
    } else {
      part<DIM><<<grid, 32 * kWarpsOfBlock>>>(layer);
      join<DIM><<<dim3(kKvHeads * kGroup, rows), DIM>>>(layer, parts);
    }
  });
  std::printf("%3d %4d %6d %3d %8.1f %6.0f\n", DIM, rows, columns, parts, us, 4 * pool / us / 1000);
  for (auto& layer : layers) cudaFree(layer.keys.numbers), cudaFree(layer.values.numbers);
}

int main() {
  const size_t words = size_t(1) << 28;
  const auto* memory = reinterpret_cast<const uint4*>(numbers(8 * words));
  uint32_t* out = device<uint32_t>(1);
  const float us = median_us([&](int) { read<<<2112, 512>>>(memory, words, out); });
  std::printf("read %.0f GB/s\n", 16 * words / us / 1000);
  const int cases[][3] = {{1, 512, 1}, {1, 16384, 32}, {8, 512, 1}, {8, 16384, 4}, {32, 512, 1}, {32, 4096, 1}, {128, 512, 1}};
  for (const auto& [rows, columns, parts] : cases) measure<64>(rows, columns, parts);
  for (const auto& [rows, columns, parts] : cases) measure<128>(rows, columns, parts);
}
