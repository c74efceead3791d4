// A prefill chunk into its pages: keys and values at any strides, a page's part of one head a block.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace mlxd {

// [rows, heads, length, DIM] of numbers.
template <typename T, int DIM>
struct Chunk {
  const T* numbers;
  int64_t row_stride, head_stride, column_stride, stride;
  int length;

  // The columns [first, first + PAGE) of a head into as many cells from `to` on, zeros past the last column; by all
  // threads of a block.
  template <int PAGE>
  __device__ void write(T* to, int row, int head, int first) const {
    const T* from = numbers + row * row_stride + head * head_stride;
    for (int i = threadIdx.x; i < PAGE * DIM; i += blockDim.x) {
      const int column = first + i / DIM;
      to[i] = column < length ? from[column * column_stride + i % DIM * stride] : static_cast<T>(0.0f);
    }
  }
};

// grid: (KV heads, pages of a row's part of the chunk, rows).
//
// keys, values: pools, cells of [pages, KV heads, PAGE].  pages: [rows, pages of a row's part], those written.
template <int PAGE, typename T, int KEY_DIM, int VALUE_DIM>
__device__ void write_chunk(Chunk<T, KEY_DIM> key, Chunk<T, VALUE_DIM> value, T* keys, T* values,
                            const int32_t* pages) {
  const int head = blockIdx.x, heads = gridDim.x, part = blockIdx.y, row = blockIdx.z;
  const size_t page = pages[static_cast<size_t>(row) * gridDim.y + part];
  const size_t cell = (page * heads + head) * PAGE;
  key.template write<PAGE>(keys + cell * KEY_DIM, row, head, part * PAGE);
  value.template write<PAGE>(values + cell * VALUE_DIM, row, head, part * PAGE);
}

}  // namespace mlxd
