// Time that the decode attention kernel takes on the GPU alone, rotating and writing as in a step, without MLX's launch.
//
//   nvcc -O3 -std=c++17 -arch=native -I batching -o /tmp/kernel_time benchmarks/kernel_time.cu && /tmp/kernel_time
//
// 8 KV heads with 4 query heads each, bfloat16, pages of 64 in random order. Before each attention 64 MB of weights are
// read by blocks that take most of an SM's memory, as products do in a step, so that no cache holds what it reads; the
// time of that alone is taken off. A line: width, rows, columns, parts of a row, warps of a block, microseconds (median
// of 15 graphs of 20 layers), GB/s of keys and values read. The first line is the rate at which a kernel that only reads
// goes through 4 GiB.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#include "graph_time.cuh"
#include "warp_products.cu"
#include "weighted_sums.cu"
#include "rotary_heads.cu"
#include "page_cells.cu"
#include "attention_kernel.cu"

constexpr int kKvHeads = 8, kGroup = 4, kPage = 64, kShortest = 32;
constexpr int kWeights = 1 << 22, kSets = 8, kSharedBytes = 200 * 1024;  // 16-byte words of a layer, and layers

template <int DIM>
struct Layer {
  mlxd::Heads<Number, mlxd::Rotary<DIM, 0>> queries, key;
  mlxd::Heads<Number, mlxd::Unrotated> value;
  mlxd::Dense<Number, DIM> keys, values;
  const int32_t* table;
  const int32_t* last;
  int width;
  Number* out;
  float *sums, *stats;
};

template <int DIM, int WARPS, typename Result>
__device__ void attend(const Layer<DIM>& layer, Result result) {
  mlxd::attend<Number, kGroup, DIM, DIM, kPage, WARPS>(layer.queries, layer.key, layer.value, layer.keys,
                                                       layer.values, layer.table, layer.width, layer.last, 0,
                                                       kShortest, 0.1f, 0.0f, result);
}

template <int DIM, int WARPS>
__global__ void whole(Layer<DIM> layer) {
  attend<DIM, WARPS>(layer, mlxd::Whole<Number, Number, false>{layer.out, nullptr});
}

template <int DIM, int WARPS>
__global__ void part(Layer<DIM> layer) {
  attend<DIM, WARPS>(layer, mlxd::Part{layer.sums, layer.stats});
}

template <int DIM>
__global__ void join(Layer<DIM> layer, int parts) {
  mlxd::join<DIM>(layer.sums, layer.stats, parts, mlxd::Whole<Number, Number, false>{layer.out, nullptr});
}

Number* numbers(size_t count) {
  Number* memory = device<Number>(count);
  fill<<<1024, 256>>>(memory, count, 0);
  return memory;
}

int32_t* integers(const std::vector<int32_t>& values) {
  int32_t* memory = device<int32_t>(values.size());
  cudaMemcpy(memory, values.data(), values.size() * sizeof(int32_t), cudaMemcpyHostToDevice);
  return memory;
}

float* random_turns(size_t rows, int dims) {
  std::vector<float> turns(rows * dims);
  for (size_t i = 0; i < turns.size(); i++) {
    const float angle = i / dims * dims + i % (dims / 2);
    turns[i] = i % dims < size_t(dims / 2) ? std::cos(angle) : std::sin(angle);
  }
  float* memory = device<float>(turns.size());
  cudaMemcpy(memory, turns.data(), turns.size() * sizeof(float), cudaMemcpyHostToDevice);
  return memory;
}

template <typename Launch>
float time_us(Launch launch) {
  const float us = median_us(launch);
  if (us < 0) std::exit(1);
  return us;
}

// What comes between two attentions.
struct Weights {
  const uint4* words = reinterpret_cast<const uint4*>(numbers(size_t(8) * kWeights * kSets));
  uint32_t* out = device<uint32_t>(1);

  Weights() { cudaFuncSetAttribute(read, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes); }

  void pass(int i, cudaStream_t stream) const {
    read<<<132, 1024, kSharedBytes, stream>>>(words + size_t(i % kSets) * kWeights, kWeights, out);
  }
};

template <int DIM, int WARPS>
void measure(const Weights& weights, int rows, int columns, int parts) {
  const int width = (columns + kPage - 1) / kPage, num_pages = rows * width, heads = kKvHeads * kGroup;
  const size_t pool = size_t(num_pages) * kKvHeads * kPage * DIM;
  std::vector<int32_t> table(num_pages), last(rows, columns - 1);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(0));
  const int64_t stride = (heads + 2 * kKvHeads) * DIM;  // of a row of the product that made all three
  const Number* made = numbers(rows * stride);
  const mlxd::Rotary<DIM, 0> rotary{random_turns(rows, DIM)};
  const Layer<DIM> first{{made, stride, DIM, 1, rotary},
                         {made + heads * DIM, stride, DIM, 1, rotary},
                         {made + (heads + kKvHeads) * DIM, stride, DIM, 1, {}},
                         {},
                         {},
                         integers(table),
                         integers(last),
                         width,
                         numbers(size_t(rows) * heads * DIM),
                         device<float>(size_t(rows) * heads * parts * DIM),
                         device<float>(size_t(rows) * heads * parts * 2)};
  std::vector<Layer<DIM>> layers(1 + 400'000'000 / (4 * pool), first);
  for (auto& layer : layers) layer.keys = {numbers(pool)}, layer.values = {numbers(pool)};

  const auto step = [&](int i, cudaStream_t stream) {
    const Layer<DIM>& layer = layers[i % layers.size()];
    const dim3 grid(parts, kKvHeads, rows);
    weights.pass(i, stream);
    if (parts == 1) {
      whole<DIM, WARPS><<<grid, 32 * WARPS, 0, stream>>>(layer);
    } else {
      part<DIM, WARPS><<<grid, 32 * WARPS, 0, stream>>>(layer);
      join<DIM><<<dim3(heads, rows), DIM, 0, stream>>>(layer, parts);
    }
  };
  const float us = time_us(step) - time_us([&](int i, cudaStream_t stream) { weights.pass(i, stream); });
  const double bytes = 4.0 * rows * columns * kKvHeads * DIM;
  std::printf("%3d %4d %6d %3d %2d %8.1f %6.0f\n", DIM, rows, columns, parts, WARPS, us, bytes / us / 1000);
  for (auto& layer : layers) cudaFree(layer.keys.numbers), cudaFree(layer.values.numbers);
}

int main() {
  const size_t words = size_t(1) << 28;
  const auto* memory = reinterpret_cast<const uint4*>(numbers(8 * words));
  uint32_t* out = device<uint32_t>(1);
  const float us = time_us([&](int, cudaStream_t stream) { read<<<2112, 512, 0, stream>>>(memory, words, out); });
  std::printf("read %.0f GB/s\n", 16 * words / us / 1000);
  const Weights weights;
  measure<64, 8>(weights, 1, 544, 1);
  measure<64, 8>(weights, 1, 16384, 32);
  measure<64, 8>(weights, 8, 544, 1);
  measure<64, 8>(weights, 8, 16384, 4);
  measure<64, 8>(weights, 32, 544, 1);
  measure<64, 8>(weights, 32, 4096, 1);
  measure<64, 2>(weights, 128, 544, 1);
  measure<128, 8>(weights, 1, 544, 1);
  measure<128, 8>(weights, 1, 16384, 32);
  measure<128, 8>(weights, 8, 544, 1);
  measure<128, 8>(weights, 8, 16384, 4);
  measure<128, 8>(weights, 32, 544, 1);
  measure<128, 8>(weights, 32, 4096, 1);
  measure<128, 4>(weights, 128, 544, 1);
}
