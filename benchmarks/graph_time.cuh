// What is timed on the GPU alone: launches of one graph, on memory full of random numbers.

#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

using Number = __nv_bfloat16;

constexpr int kCalls = 20;  // of a graph
constexpr int kRepeats = 15;

__global__ void fill(Number* numbers, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    uint32_t bits = (uint32_t(i) + seed) * 2654435761u;
    bits = (bits ^ bits >> 15) * 2246822519u;
    numbers[i] = __float2bfloat16(float(bits >> 16) / 32768.0f - 1.0f);
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

// Microseconds of each of kCalls launches, all in one graph. launch: of a call on a stream. Less than 0 where it does not
// run.
template <typename Launch>
float median_us(Launch launch) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t calls;
  cudaEvent_t begun, ended;
  cudaStreamCreate(&stream), cudaEventCreate(&begun), cudaEventCreate(&ended);
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed);
  for (int i = 0; i < kCalls; i++) launch(i, stream);
  cudaStreamEndCapture(stream, &graph);
  if (cudaGraphInstantiate(&calls, graph, 0) != cudaSuccess) return -1;
  std::vector<float> times;
  for (int repeat = 0; repeat <= kRepeats; repeat++) {
    float ms = 0;
    cudaEventRecord(begun, stream);
    cudaGraphLaunch(calls, stream);
    cudaEventRecord(ended, stream), cudaEventSynchronize(ended), cudaEventElapsedTime(&ms, begun, ended);
    if (repeat) times.push_back(1000 * ms / kCalls);
  }
  cudaGraphExecDestroy(calls), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
  cudaEventDestroy(begun), cudaEventDestroy(ended);
  if (cudaGetLastError() != cudaSuccess) return -1;
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}
