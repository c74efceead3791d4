// Decode attention over pages: one position a row is written and attends; keys and values are read where they lie,
// once for all the query heads that share them. Follows warp_products.cu, rotary_heads.cu and page_cells.cu.
//
// A block owns one row, one KV head with up to 8 of its query heads, and one part of the row's columns; its warps take
// tiles of 16 columns by turns. Weights are powers of two, of scores times log2(e), relative to the largest one seen.

namespace mlxd {

constexpr int kTile = 16;
constexpr int kHeads = 8;
constexpr float kNothing = -1e30f;  // below any score; finite, so that differences are
constexpr float kLog2E = 1.4426950408889634f;

// The columns [begin, end) that a row attends to, and the tiles of them that this block takes.
struct Columns {
  int begin, end, first_tile, last_tile;

  // shortest: tiles of a part below which a row is not divided further.
  __device__ Columns(int last, int window, int shortest) {
    end = last + 1, begin = window ? max(0, end - window) : 0;
    const int first = begin / kTile, past = (end + kTile - 1) / kTile, parts = gridDim.x;
    const int count = max(shortest, (past - first + parts - 1) / parts);
    first_tile = first + blockIdx.x * count;
    last_tile = min(past, first_tile + count);
  }

  __device__ bool hold(int column) const { return column >= begin && column < end; }

  __device__ bool hold_last() const { return first_tile < last_tile && last_tile * kTile >= end; }
};

// Sums of weighted values over the columns seen, of 8 heads: N results of a product.
template <int N>
struct Sums {
  static constexpr int kFloats = 4 + 4 * N;

  float top[2], total[2];  // largest score and sum of weights, of heads 2t and 2t + 1
  float out[N][4];

  __device__ void clear() {
    top[0] = top[1] = kNothing;
    total[0] = total[1] = 0;
#pragma unroll
    for (int i = 0; i < 4 * N; i++) out[i / 4][i % 4] = 0;
  }

  __device__ void raise(const float (&next)[2]) {
    const float by[2] = {exp2f(top[0] - next[0]), exp2f(top[1] - next[1])};
#pragma unroll
    for (int h = 0; h < 2; h++) top[h] = next[h], total[h] *= by[h];
#pragma unroll
    for (int i = 0; i < 4 * N; i++) out[i / 4][i % 4] *= by[i & 1];
  }

  // Turns scores of 16 columns, one of which there must be, into their weights.
  __device__ void weigh(float (&scores)[4]) {
    float next[2] = {fmaxf(scores[0], scores[2]), fmaxf(scores[1], scores[3])};
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int x = 4; x < kLanes; x *= 2) next[h] = fmaxf(next[h], __shfl_xor_sync(~0u, next[h], x));
      next[h] = fmaxf(next[h], top[h]);
    }
    if (__any_sync(~0u, next[0] > top[0] || next[1] > top[1])) raise(next);
#pragma unroll
    for (int r = 0; r < 4; r++) scores[r] = exp2f(scores[r] - top[r & 1]);
    total[0] += scores[0] + scores[2];
    total[1] += scores[1] + scores[3];
  }

  // Until here each lane has summed the weights of its own columns.
  __device__ void gather_totals() {
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int x = 4; x < kLanes; x *= 2) total[h] += __shfl_xor_sync(~0u, total[h], x);
    }
  }

  __device__ void store(float* to) const {
#pragma unroll
    for (int h = 0; h < 2; h++) to[h * kLanes] = top[h], to[(2 + h) * kLanes] = total[h];
#pragma unroll
    for (int i = 0; i < 4 * N; i++) to[(4 + i) * kLanes] = out[i / 4][i % 4];
  }

  __device__ void add(const float* stored) {
    const float next[2] = {fmaxf(top[0], stored[0]), fmaxf(top[1], stored[kLanes])};
    const float by[2] = {exp2f(stored[0] - next[0]), exp2f(stored[kLanes] - next[1])};
    raise(next);
#pragma unroll
    for (int h = 0; h < 2; h++) total[h] += by[h] * stored[(2 + h) * kLanes];
#pragma unroll
    for (int i = 0; i < 4 * N; i++) out[i / 4][i % 4] += by[i & 1] * stored[(4 + i) * kLanes];
  }
};

// Where sums become the attention itself, [rows, heads, value_dim]. sinks: a logit a head that takes weight alone.
template <typename T, typename Sink, bool SINKS>
struct Whole {
  T* out;
  const Sink* sinks;

  template <int N>
  __device__ void write(int row, int head, int num_heads, int dim, int value_dim, float top, float total,
                        const float (&numbers)[N]) const {
    float by = 1;
    if constexpr (SINKS) {
      const float sink = static_cast<float>(sinks[head]) * kLog2E, next = fmaxf(top, sink);
      by = exp2f(top - next);
      total = total * by + exp2f(sink - next);
    }
    T* to = out + (static_cast<size_t>(row) * num_heads + head) * value_dim + dim;
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = static_cast<T>(numbers[i] * by / total);
  }
};

// Where a part's sums go, [rows, heads, parts, value_dim], and its top and total, [rows, heads, parts, 2].
struct Part {
  float* sums;
  float* stats;

  template <int N>
  __device__ void write(int row, int head, int num_heads, int dim, int value_dim, float top, float total,
                        const float (&numbers)[N]) const {
    const size_t at = (static_cast<size_t>(row) * num_heads + head) * gridDim.x + blockIdx.x;
    if (dim == 0) stats[2 * at] = top, stats[2 * at + 1] = total;
    if (total == 0) return;  // nobody reads them
#pragma unroll
    for (int i = 0; i < N; i++) sums[at * value_dim + dim + i] = numbers[i];
  }
};

// One lane's words of 8 query heads and of a tile of columns, and what is made of them.
template <typename T, int GROUP, int KEY_DIM, int VALUE_DIM, int WARPS>
struct Lane {
  static constexpr int kPerWord = 4 / sizeof(T);
  static constexpr int kKeyChunk = 16 * kPerWord;  // what 4 lanes load, 4 words each
  static constexpr int kWords = VALUE_DIM % (32 * kPerWord) == 0 ? 4 : 2;
  static constexpr int kMine = kWords * kPerWord;  // dimensions of one lane
  static constexpr int kValueChunk = 8 * kMine;    // what 8 lanes load
  static constexpr int kKeyChunks = KEY_DIM / kKeyChunk, kValueChunks = VALUE_DIM / kValueChunk;
  static_assert(KEY_DIM % kKeyChunk == 0 && VALUE_DIM % kValueChunk == 0, "widths are multiples of 32");

  const int lane, warp, g, t;
  uint32_t query[kKeyChunks][4];
  uint32_t key[2][kKeyChunks][4];
  uint32_t value[kValueChunks][4][kWords];
  Sums<VALUE_DIM / 16> sums;

  __device__ Lane() : lane(threadIdx.x % kLanes), warp(threadIdx.x / kLanes), g(lane / 4), t(lane % 4) {
    sums.clear();
  }

  // queries: [count, KEY_DIM].
  __device__ void load_queries(const T* queries, int count) {
    const T* from = queries + g * KEY_DIM + t * 4 * kPerWord;
#pragma unroll
    for (int c = 0; c < kKeyChunks; c++) load(query[c], from + c * kKeyChunk, g < count);
  }

  // cell: of the tile's first column.
  template <typename Keys, typename Values>
  __device__ void load_tile(const Keys& keys, const Values& values, size_t cell, int column, const Columns& columns) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int j = g + 8 * i;
#pragma unroll
      for (int c = 0; c < kKeyChunks; c++) {
        keys.load(key[i][c], cell + j, c * kKeyChunk + t * 4 * kPerWord, columns.hold(column + j));
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int j = Weighing<T>::column(i, t);
#pragma unroll
      for (int c = 0; c < kValueChunks; c++) {
        values.load(value[c][i], cell + j, c * kValueChunk + g * kMine, columns.hold(column + j));
      }
    }
  }

  __device__ void attend(int column, const Columns& columns, float scale, float cap) {
    float scores[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 2 * kKeyChunks; i++) {
      const int c = i / 2, j = i % 2 * 2;
      const uint32_t a[4] = {key[0][c][j], key[1][c][j], key[0][c][j + 1], key[1][c][j + 1]};
      const uint32_t b[2] = {query[c][j], query[c][j + 1]};
      mma(scores, a, b, T());
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const float score = cap ? cap * tanhf(scores[r] * scale / cap) : scores[r] * scale;
      scores[r] = columns.hold(column + g + 4 * (r & 2)) ? score * kLog2E : kNothing;
    }
    sums.weigh(scores);
    uint32_t turned[4];
    Weighing<T>::turn(scores, g, t, turned);
#pragma unroll
    for (int c = 0; c < kValueChunks; c++) Weighing<T>::add(sums.out, c * kMine / 2, value[c], turned);
  }

  // All warps' sums into those of the first.
  __device__ void join_warps() {
    __shared__ float shared[WARPS / 2][Sums<VALUE_DIM / 16>::kFloats * kLanes];
    sums.gather_totals();
#pragma unroll
    for (int half = WARPS / 2; half > 0; half /= 2) {
      if (warp >= half && warp < 2 * half) sums.store(&shared[warp - half][lane]);
      __syncthreads();
      if (warp < half) sums.add(&shared[warp][lane]);
      __syncthreads();
    }
  }

  template <typename Result>
  __device__ void write(int row, int kv_head, int kv_heads, int first_head, const Result& result) const {
#pragma unroll
    for (int i = 0; i < 2 * kValueChunks; i++) {
      const int h = i % 2, c = i / 2, head = first_head + 2 * t + h;
      if (head >= GROUP) continue;
      float numbers[kMine];
#pragma unroll
      for (int d = 0; d < kMine; d++) numbers[d] = sums.out[c * kMine / 2 + d / 2][h + 2 * (d & 1)];
      result.write(row, kv_head * GROUP + head, kv_heads * GROUP, c * kValueChunk + g * kMine, VALUE_DIM,
                   sums.top[h], sums.total[h], numbers);
    }
  }
};

// grid: (parts, KV heads * blocks of their query heads, rows), WARPS warps a block.
//
// queries: heads of [rows, KV heads * GROUP].  key, value: of the new position, heads or cells of [rows, KV heads].
// keys, values: cells of [pages, KV heads, PAGE]; every block that reads the new position's column writes it first.
// table: [rows, width], pages of a row in order.  last: [rows], column of the new position.
// scale: of scores.  cap: scores become cap * tanh(score / cap), where it is not 0.
template <typename T, int GROUP, int KEY_DIM, int VALUE_DIM, int PAGE, int WARPS, typename Queries, typename Key,
          typename Value, typename Keys, typename Values, typename Result>
__device__ void attend(Queries queries, Key key, Value value, Keys keys, Values values, const int32_t* table,
                       int width, const int32_t* last, int window, int shortest, float scale, float cap,
                       Result result) {
  static_assert(PAGE % kTile == 0, "a tile lies in one page");
  constexpr int kBlocks = (GROUP + kHeads - 1) / kHeads;
  const int row = blockIdx.z, kv_heads = gridDim.y / kBlocks, kv_head = blockIdx.y / kBlocks;
  const int first_head = blockIdx.y % kBlocks * kHeads, count = min(kHeads, GROUP - first_head);
  const Columns columns(last[row], window, shortest);
  const int32_t* pages = table + static_cast<size_t>(row) * width;

  const auto cell = [&](int page, int column) {
    return (static_cast<size_t>(page) * kv_heads + kv_head) * PAGE + column % PAGE;
  };
  if (columns.hold_last()) {
    const size_t at = cell(pages[last[row] / PAGE], last[row]);
    keys.take(at, key, row, kv_head, kv_heads);
    values.take(at, value, row, kv_head, kv_heads);
  }
  alignas(16) __shared__ T shared[kHeads * KEY_DIM];
  queries.template copy<KEY_DIM>(shared, row, kv_head * GROUP + first_head, count);
  __syncthreads();

  Lane<T, GROUP, KEY_DIM, VALUE_DIM, WARPS> mine;
  mine.load_queries(shared, count);
  int tile = columns.first_tile + mine.warp;
  int page = tile < columns.last_tile ? pages[tile * kTile / PAGE] : 0;
  while (tile < columns.last_tile) {
    const int column = tile * kTile;
    mine.load_tile(keys, values, cell(page, column), column, columns);
    tile += WARPS;
    if (tile < columns.last_tile) page = pages[tile * kTile / PAGE];
    mine.attend(column, columns, scale, cap);
  }
  mine.join_warps();
  if (mine.warp == 0) mine.write(row, kv_head, kv_heads, first_head, result);
}

// The parts of each row together. grid: (heads, rows), VALUE_DIM threads a block.
template <int VALUE_DIM, typename Result>
__device__ void join(const float* sums, const float* stats, int parts, Result result) {
  const int head = blockIdx.x, row = blockIdx.y, dim = threadIdx.x;
  const size_t first = (static_cast<size_t>(row) * gridDim.x + head) * parts;
  float top = kNothing, total = 0, numbers[1] = {0};
  for (size_t i = first; i < first + parts; i++) top = fmaxf(top, stats[2 * i]);
  for (size_t i = first; i < first + parts; i++) {
    if (stats[2 * i + 1] == 0) continue;
    const float by = exp2f(stats[2 * i] - top);
    total += by * stats[2 * i + 1];
    numbers[0] += by * sums[i * VALUE_DIM + dim];
  }
  result.write(row, head, gridDim.x, dim, VALUE_DIM, top, total, numbers);
}

}  // namespace mlxd
