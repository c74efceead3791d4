// y = x times a layer's weight, transposed, for up to 32 rows of x: each number of the weight is read once, and from
// memory to registers, where it is a left operand as it lies. Follows warp_products.cu.
//
// A block takes groups of TILES * 16 rows of the weight by turns. Its warps divide the inner dimension among them, a
// span each by turns, and join their sums in shared memory. What a warp reads next is on its way while it multiplies.
// The order in which numbers are summed depends on the inner dimension, SPAN and WARPS alone: neither on how many rows
// x has, nor on which of them, nor on the number of blocks.

namespace mlxd {

constexpr int kTileRows = 16;
constexpr int kColumns = 8;  // rows of x that are the columns of one product
constexpr int kStep = 32;    // inner numbers that 4 lanes read at once, 16 bytes each
constexpr int kMine = 8;     // those of one lane

// Read once, so that nothing is kept of it.
__device__ inline void load_once(uint32_t (&words)[4], const void* from) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(from));
}

// Read by every block, so that it stays near.
__device__ inline void load_often(uint32_t (&words)[4], const void* from) {
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(from));
}

// Rows of an array, of which the first axes are.
template <typename Shape>
__device__ int count_rows(const Shape& shape, int axes) {
  int rows = 1;
  for (int i = 0; i < axes; i++) rows *= shape[i];
  return rows;
}

// Operands of one step: 16 * TILES rows of the weight by 8 * COLUMNS rows of x.
template <typename T, int TILES, int COLUMNS>
struct Step {
  uint32_t weight[TILES][2][4];
  uint32_t x[COLUMNS][4];

  __device__ void multiply(float (&sums)[TILES][COLUMNS][4]) const {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        const uint32_t a[4] = {weight[tile][0][i], weight[tile][1][i], weight[tile][0][i + 1],
                               weight[tile][1][i + 1]};
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
          const uint32_t b[2] = {x[c][i], x[c][i + 1]};
          mma(sums[tile][c], a, b, T());
        }
      }
    }
  }
};

// A product's arrays: x [rows, inner], weight [outputs, inner], bias [outputs] or null, y [rows, outputs].
template <typename T>
struct Product {
  const T* x;
  const T* weight;
  const T* bias;
  T* y;
  int rows, outputs, inner;
};

// What one warp reads: spans of SPAN steps, of one group of the weight's rows after another. The last group ends with
// the last row, and so may begin in the one before.
template <typename T, int TILES, int COLUMNS, int WARPS, int SPAN>
struct Reader {
  static constexpr int kRows = TILES * kTileRows;

  const Product<T>& product;
  const int warp, g, t, spans, groups;
  int group, span;
  const T* weight;  // this lane's first number of the group
  int x[COLUMNS];   // where this lane's numbers begin

  __device__ Reader(const Product<T>& product, int warp, int lane)
      : product(product), warp(warp), g(lane / 4), t(lane % 4), spans(product.inner / (SPAN * kStep)),
        groups((product.outputs + kRows - 1) / kRows), group(blockIdx.x), span(warp) {
    if (warp >= spans) group = groups;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      x[c] = min(kColumns * c + g, product.rows - 1) * product.inner + kMine * t;
    }
    find();
  }

  __device__ bool is_past() const { return group >= groups; }

  static __device__ int first_row(int group, int outputs) { return min(group * kRows, outputs - kRows); }

  __device__ void find() {
    const size_t row = first_row(group, product.outputs) + g;
    weight = product.weight + row * product.inner + kMine * t;
  }

  __device__ void advance() {
    span += WARPS;
    if (span < spans) return;
    span = warp, group += gridDim.x;
    find();
  }

  __device__ void load(Step<T, TILES, COLUMNS>& step, int index) const {
    const int at = (span * SPAN + index) * kStep;
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
      load_once(step.weight[i / 2][i % 2], weight + at + static_cast<int64_t>(8 * i) * product.inner);
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) load_often(step.x[c], product.x + x[c] + at);
  }
};

// The sums of all warps of a block, of one tile, into y. shared: [WARPS, COLUMNS, lanes].
template <typename T, int COLUMNS, int WARPS>
__device__ void join(const float (&sums)[COLUMNS][4], float4* shared, const Product<T>& product, int first) {
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  __syncthreads();  // all that was there was read
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    shared[(warp * COLUMNS + c) * kLanes + lane] = make_float4(sums[c][0], sums[c][1], sums[c][2], sums[c][3]);
  }
  __syncthreads();
  for (int c = warp; c < COLUMNS; c += WARPS) {
    float total[4] = {0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float4 part = shared[(w * COLUMNS + c) * kLanes + lane];
      total[0] += part.x, total[1] += part.y, total[2] += part.z, total[3] += part.w;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = kColumns * c + 2 * (lane % 4) + (i & 1), output = first + lane / 4 + 4 * (i & 2);
      if (row >= product.rows) continue;
      const float bias = product.bias ? static_cast<float>(product.bias[output]) : 0.0f;
      product.y[static_cast<size_t>(row) * product.outputs + output] = static_cast<T>(total[i] + bias);
    }
  }
}

// grid: any number of blocks of WARPS warps. COLUMNS: eights of rows. AHEAD: steps whose operands are on their way at
// once. outputs: a multiple of 16, and at least 16 * TILES; inner: a multiple of 32 * SPAN. Arrays lie together, and
// begin at multiples of 16 bytes.
template <typename T, int TILES, int COLUMNS, int WARPS, int SPAN, int AHEAD>
__device__ void multiply(const Product<T>& product) {
  static_assert(SPAN % AHEAD == 0, "a step has one place of its own");
  __shared__ float4 shared[WARPS * COLUMNS * kLanes];
  Reader<T, TILES, COLUMNS, WARPS, SPAN> next(product, threadIdx.x / kLanes, threadIdx.x % kLanes);
  const int groups = next.groups, spans = next.spans, warp = next.warp;
  Step<T, TILES, COLUMNS> steps[AHEAD];
  if (!next.is_past()) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) next.load(steps[i], i);
  }
  for (int group = blockIdx.x; group < groups; group += gridDim.x) {
    float sums[TILES][COLUMNS][4] = {};
    for (int span = warp; span < spans; span += WARPS) {
#pragma unroll
      for (int i = 0; i < SPAN; i++) {
        steps[i % AHEAD].multiply(sums);
        if (i + AHEAD == SPAN) next.advance();
        if (!next.is_past()) next.load(steps[i % AHEAD], (i + AHEAD) % SPAN);
      }
    }
    const int first = next.first_row(group, product.outputs);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      join<T, COLUMNS, WARPS>(sums[tile], shared, product, first + tile * kTileRows);
    }
  }
}

}  // namespace mlxd
