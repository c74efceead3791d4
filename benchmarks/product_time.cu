// Time that products of a few rows take on the GPU alone, by variants of the kernel, without MLX's launch.
//
//   nvcc -O3 -std=c++17 -arch=native -I batching -DROWS=32 -o /tmp/product_time benchmarks/product_time.cu
//   /tmp/product_time
//
// bfloat16, ROWS rows, the layers of Llama 3.2 1B and 3.1 8B with joined projections, one weight after another,
// more of them than a cache holds. JSON lines: the variant, blocks, registers of a lane and microseconds (median of 15
// times a graph of 20 launches); then the best variant of each shape, with GB/s of the weight read, and what its worst
// number is off, in parts of the largest one. The first line is the rate at which a kernel that only reads goes through
// 2 GiB. With -DCUBLAS and -lcublas, cuBLAS's times beside them.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#ifdef CUBLAS
#include <cublas_v2.h>
#endif

#include "graph_time.cuh"
#include "warp_products.cu"
#include "product_kernel.cu"

constexpr int kRows = ROWS;
constexpr size_t kNumbers = size_t(1) << 30;  // of all weights together

struct Shape {
  const char* name;
  int outputs, inner;
};

constexpr Shape kShapes[] = {
    {"1b o", 2048, 2048},       {"1b qkv", 3072, 2048},  {"1b gate+up", 16384, 2048}, {"1b down", 2048, 8192},
    {"1b head", 128256, 2048},  {"8b o", 4096, 4096},    {"8b qkv", 6144, 4096},      {"8b gate+up", 28672, 4096},
    {"8b down", 4096, 14336},   {"8b head", 128256, 4096},
};

struct Best {
  float us = 1e9f, off = 0;
  int tiles = 0, warps = 0, span = 0, ahead = 0, blocks = 0;
};

template <int TILES, int WARPS, int SPAN, int AHEAD>
__global__ void multiply(mlxd::Product<Number> product) {
  mlxd::multiply<Number, TILES, (kRows + 7) / 8, WARPS, SPAN, AHEAD>(product);
}

__global__ void plainly(mlxd::Product<Number> product, float* y) {
  const int output = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (output >= product.outputs) return;
  float sum = 0;
  for (int i = 0; i < product.inner; i++) {
    sum += static_cast<float>(product.x[size_t(row) * product.inner + i]) *
           static_cast<float>(product.weight[size_t(output) * product.inner + i]);
  }
  y[size_t(row) * product.outputs + output] = sum;
}

float largest(const std::vector<float>& numbers) {
  float most = 0;
  for (float x : numbers) most = std::isnan(x) ? INFINITY : std::max(most, std::abs(x));
  return most;
}

struct Bench {
  const Number* weights;
  Number *x, *y;
  float* exact;
  int num_sms;
  Shape shape;
  std::vector<float> expected;
  Best best;

  mlxd::Product<Number> product(int call) const {
    const size_t count = size_t(shape.outputs) * shape.inner;
    return {x, weights + call % (kNumbers / count) * count, nullptr, y, kRows, shape.outputs, shape.inner};
  }

  void expect() {
    const size_t count = size_t(kRows) * shape.outputs;
    plainly<<<dim3((shape.outputs + 255) / 256, kRows), 256>>>(product(0), exact);
    expected.resize(count);
    cudaMemcpy(expected.data(), exact, 4 * count, cudaMemcpyDeviceToHost);
  }

  template <int TILES, int WARPS, int SPAN, int AHEAD>
  float off(int blocks) {
    std::vector<Number> found(expected.size());
    cudaMemset(y, 0xff, 2 * found.size());
    multiply<TILES, WARPS, SPAN, AHEAD><<<blocks, 32 * WARPS>>>(product(0));
    cudaMemcpy(found.data(), y, 2 * found.size(), cudaMemcpyDeviceToHost);
    std::vector<float> differences(found.size());
    for (size_t i = 0; i < found.size(); i++) differences[i] = __bfloat162float(found[i]) - expected[i];
    return largest(differences) / largest(expected);
  }

  template <int TILES, int WARPS, int SPAN, int AHEAD>
  void measure() {
    if (shape.inner % (32 * SPAN)) return;
    cudaFuncAttributes attributes{};
    int resident = 0;
    cudaFuncGetAttributes(&attributes, multiply<TILES, WARPS, SPAN, AHEAD>);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, multiply<TILES, WARPS, SPAN, AHEAD>, 32 * WARPS, 0);
    const int groups = (shape.outputs + 16 * TILES - 1) / (16 * TILES), most = resident * num_sms;
    const int even = most ? (groups + (groups + most - 1) / most - 1) / ((groups + most - 1) / most) : 0;
    int before = 0;
    for (int blocks : {groups, std::min(groups, most), even}) {
      if (blocks == before || !most) continue;
      before = blocks;
      const float us = median_us([&](int i, cudaStream_t stream) {
        multiply<TILES, WARPS, SPAN, AHEAD><<<blocks, 32 * WARPS, 0, stream>>>(product(i));
      });
      std::printf("{\"shape\": \"%s\", \"rows\": %d, \"tiles\": %d, \"warps\": %d, \"span\": %d, "
                  "\"ahead\": %d, \"blocks\": %d, \"resident\": %d, \"registers\": %d, \"spilled\": %zu, \"us\": %.2f}\n",
                  shape.name, kRows, TILES, WARPS, SPAN, AHEAD, blocks, resident, attributes.numRegs,
                  attributes.localSizeBytes, us);
      const float wrong = off<TILES, WARPS, SPAN, AHEAD>(blocks);
      if (!(wrong < 0.01f)) std::printf("{\"WRONG\": %g}\n", wrong);
      if (us > 0 && us < best.us) best = {us, wrong, TILES, WARPS, SPAN, AHEAD, blocks};
    }
  }

#ifdef CUBLAS
  void measure_cublas() {
    cublasHandle_t handle;
    void* workspace = device<uint8_t>(32 << 20);
    cublasCreate(&handle), cublasSetWorkspace(handle, workspace, 32 << 20);
    const float one = 1, none = 0;
    const float us = median_us([&](int i, cudaStream_t stream) {
      cublasSetStream(handle, stream), cublasSetWorkspace(handle, workspace, 32 << 20);
      cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, shape.outputs, kRows, shape.inner, &one, product(i).weight,
                   CUDA_R_16BF, shape.inner, x, CUDA_R_16BF, shape.inner, &none, y, CUDA_R_16BF, shape.outputs,
                   CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    });
    std::printf("{\"cublas\": \"%s\", \"rows\": %d, \"us\": %.2f}\n", shape.name, kRows, us);
    cublasDestroy(handle), cudaFree(workspace);
  }
#endif
};

int main() {
  Number *weights = device<Number>(kNumbers), *x = device<Number>(kRows * 16384);
  fill<<<1024, 256>>>(weights, kNumbers, 1), fill<<<1024, 256>>>(x, kRows * 16384, 12345);
  cudaDeviceProp properties{};
  cudaGetDeviceProperties(&properties, 0);
  uint32_t* out = device<uint32_t>(1);
  const size_t words = kNumbers / 8;
  const float us = median_us([&](int, cudaStream_t stream) {
    read<<<2112, 512, 0, stream>>>(reinterpret_cast<uint4*>(weights), words, out);
  });
  std::printf("{\"read_gb_per_s\": %.0f, \"sms\": %d}\n", 16 * words / us / 1000, properties.multiProcessorCount);
  Bench bench{weights, x, device<Number>(kRows * 128256), device<float>(kRows * 128256),
              properties.multiProcessorCount};
  for (const Shape& shape : kShapes) {
    bench.shape = shape, bench.best = {};
    bench.expect();
    bench.measure<1, 16, 2, 2>(), bench.measure<2, 16, 2, 2>(), bench.measure<2, 16, 2, 1>();
    bench.measure<1, 8, 4, 4>(), bench.measure<1, 8, 2, 2>(), bench.measure<2, 8, 4, 2>(), bench.measure<1, 4, 2, 2>();
    bench.measure<1, 4, 4, 4>(), bench.measure<2, 4, 4, 2>(), bench.measure<2, 4, 4, 4>();
    if constexpr (kRows > 16) {
      bench.measure<3, 16, 2, 1>(), bench.measure<2, 16, 4, 1>(), bench.measure<4, 8, 4, 1>();
      bench.measure<3, 8, 4, 2>(), bench.measure<2, 4, 4, 1>(), bench.measure<3, 4, 4, 2>();
      bench.measure<4, 4, 4, 1>(), bench.measure<4, 4, 4, 2>();
    }
#ifdef CUBLAS
    bench.measure_cublas();
#endif
    const Best& best = bench.best;
    std::printf("{\"best\": \"%s\", \"rows\": %d, \"tiles\": %d, \"warps\": %d, \"span\": %d, "
                "\"ahead\": %d, \"blocks\": %d, \"us\": %.2f, \"gb_per_s\": %.0f, \"off\": %.2g}\n",
                shape.name, kRows, best.tiles, best.warps, best.span, best.ahead, best.blocks, best.us,
                2e-3f * shape.outputs * shape.inner / best.us, best.off);
  }
  return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}
