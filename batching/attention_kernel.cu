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

  // Whether it lies in its page already, which the last does not.
  __device__ bool hold_written(int column) const { return column >= begin && column < end - 1; }

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

// As few stores as there can be: N numbers fill at most 16 bytes, or a whole number of those.
template <typename T, int N>
__device__ inline void store(T* to, const float (&numbers)[N], float by) {
  constexpr int kTogether = N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
  struct alignas(kTogether * sizeof(T)) Together {
    T numbers[kTogether];
  };
#pragma unroll
  for (int i = 0; i < N; i += kTogether) {
    Together together;
#pragma unroll
    for (int j = 0; j < kTogether; j++) together.numbers[j] = static_cast<T>(numbers[i + j] * by);
    *reinterpret_cast<Together*>(to + i) = together;
  }
}

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
    store(out + (static_cast<size_t>(row) * num_heads + head) * value_dim + dim, numbers, by / total);
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
    store(sums + at * value_dim + dim, numbers, 1);
  }
};

// One lane's words of 8 query heads and of DEPTH tiles of columns, and what is made of them.
template <typename T, int GROUP, int KEY_DIM, int VALUE_DIM, int WARPS, int DEPTH>
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
  uint32_t key[DEPTH][2][kKeyChunks][4];
  uint32_t value[DEPTH][kValueChunks][4][kWords];
  Sums<VALUE_DIM / 16> sums;

  __device__ Lane() : lane(threadIdx.x % kLanes), warp(threadIdx.x / kLanes), g(lane / 4), t(lane % 4) {
    sums.clear();
  }

  // queries: [8, KEY_DIM].
  __device__ void load_queries(const T* queries) {
    const T* from = queries + g * KEY_DIM + t * 4 * kPerWord;
#pragma unroll
    for (int c = 0; c < kKeyChunks; c++) load(query[c], from + c * kKeyChunk, true);
  }

  // cell: of the tile's first column.
  template <typename Keys>
  __device__ void load_keys(int slot, const Keys& keys, size_t cell, int column, const Columns& columns) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int j = g + 8 * i;
#pragma unroll
      for (int c = 0; c < kKeyChunks; c++) {
        keys.load(key[slot][i][c], cell + j, c * kKeyChunk + t * 4 * kPerWord, columns.hold_written(column + j));
      }
    }
  }

  template <typename Values>
  __device__ void load_values(int slot, const Values& values, size_t cell, int column, const Columns& columns) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int j = Weighing<T>::column(i, t);
#pragma unroll
      for (int c = 0; c < kValueChunks; c++) {
        values.load(value[slot][c][i], cell + j, c * kValueChunk + g * kMine, columns.hold_written(column + j));
      }
    }
  }

  // The new position, j-th of a tile, from the first cells of these.
  template <typename Keys, typename Values>
  __device__ void load_new(int slot, const Keys& keys, const Values& values, int j) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (g + 8 * i != j) continue;
#pragma unroll
      for (int c = 0; c < kKeyChunks; c++) keys.load(key[slot][i][c], 0, c * kKeyChunk + t * 4 * kPerWord, true);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (Weighing<T>::column(i, t) != j) continue;
#pragma unroll
      for (int c = 0; c < kValueChunks; c++) values.load(value[slot][c][i], 0, c * kValueChunk + g * kMine, true);
    }
  }

  __device__ void multiply_keys(int slot, const T* queries, float (&scores)[4]) {
#ifdef SHQ
    load_queries(queries);
#endif
#pragma unroll
    for (int i = 0; i < 2 * kKeyChunks; i++) {
      const int c = i / 2, j = i % 2 * 2;
      const uint32_t a[4] = {key[slot][0][c][j], key[slot][1][c][j], key[slot][0][c][j + 1], key[slot][1][c][j + 1]};
      const uint32_t b[2] = {query[c][j], query[c][j + 1]};
      mma(scores, a, b, T());
    }
  }

  __device__ void add_values(int slot, int column, const Columns& columns, float scale, float cap, float (&scores)[4]) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const float score = cap ? cap * tanhf(scores[r] * scale / cap) : scores[r] * scale;
      scores[r] = columns.hold(column + g + 4 * (r & 2)) ? score * kLog2E : kNothing;
    }
    sums.weigh(scores);
    uint32_t turned[4];
    Weighing<T>::turn(scores, g, t, turned);
#pragma unroll
    for (int c = 0; c < kValueChunks; c++) Weighing<T>::add(sums.out, c * kMine / 2, value[slot][c], turned);
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
      if (half > 1) __syncthreads();
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
// keys, values: cells of [pages, KV heads, PAGE]; blocks whose part holds the new position's column write it there.
// table: [rows, width], pages of a row in order.  last: [rows], column of the new position.
// scale: of scores.  cap: scores become cap * tanh(score / cap), where it is not 0.
template <typename T, int GROUP, int KEY_DIM, int VALUE_DIM, int PAGE, int WARPS, int DEPTH, typename Queries,
          typename Key, typename Value, typename Keys, typename Values, typename Result>
__device__ void attend(Queries queries, Key key, Value value, Keys keys, Values values, const int32_t* table,
                       int width, const int32_t* last, int window, int shortest, float scale, float cap,
                       Result result) {
  static_assert(PAGE % kTile == 0, "a tile lies in one page");
  constexpr int kBlocks = (GROUP + kHeads - 1) / kHeads, kThreads = WARPS * kLanes;
  const int row = blockIdx.z, kv_heads = gridDim.y / kBlocks, kv_head = blockIdx.y / kBlocks;
  const int first_head = blockIdx.y % kBlocks * kHeads, count = min(kHeads, GROUP - first_head);

  alignas(16) __shared__ T shared_queries[kHeads * KEY_DIM];
  alignas(16) __shared__ T shared_key[KEY_DIM];
  alignas(16) __shared__ T shared_value[VALUE_DIM];
  const auto share = queries.template share<KEY_DIM, kHeads, kThreads>(row, kv_head * GROUP + first_head, count);
  const NewCell<Key, KEY_DIM, kThreads> new_key(key, shared_key, row, kv_head, kv_heads);
  const NewCell<Value, VALUE_DIM, kThreads> new_value(value, shared_value, row, kv_head, kv_heads);

  const int32_t* pages = table + static_cast<size_t>(row) * width;
  Lane<T, GROUP, KEY_DIM, VALUE_DIM, WARPS, DEPTH> mine;
#ifdef GUESS
  const int guess = pages[min(mine.warp * kTile / PAGE, width - 1)];
#endif
  const Columns columns(last[row], window, shortest);
  const int new_column = columns.end - 1, new_page = columns.hold_last() ? pages[new_column / PAGE] : 0;
  const auto cell = [&](int page, int column) {
    return (static_cast<size_t>(page) * kv_heads + kv_head) * PAGE + column % PAGE;
  };

  int tile = columns.first_tile + mine.warp;  // the next that is not loaded
#ifdef GUESS
  int page = window || gridDim.x > 1 ? tile < columns.last_tile ? pages[tile * kTile / PAGE] : 0 : guess;
#else
  int page = tile < columns.last_tile ? pages[tile * kTile / PAGE] : 0;
#endif
#pragma unroll
  for (int slot = 0; slot < DEPTH; slot++) {
    mine.load_keys(slot, keys, cell(page, tile * kTile), tile * kTile, columns);
    mine.load_values(slot, values, cell(page, tile * kTile), tile * kTile, columns);
    tile += WARPS;
    page = tile < columns.last_tile ? pages[tile * kTile / PAGE] : 0;
  }

  share.store(shared_queries);
  new_key.store();
  new_value.store();
  __syncthreads();
  if (columns.hold_last()) {
    keys.take(cell(new_page, new_column), new_key.cells);
    values.take(cell(new_page, new_column), new_value.cells);
  }
#ifndef SHQ
  mine.load_queries(shared_queries);
#endif
  for (int current = columns.first_tile + mine.warp; current < columns.last_tile;) {
#pragma unroll
    for (int slot = 0; slot < DEPTH; slot++) {
      if (DEPTH > 1 && current >= columns.last_tile) break;
      if (current == new_column / kTile) mine.load_new(slot, new_key.cells, new_value.cells, new_column % kTile);
      const size_t next = cell(page, tile * kTile);
      const bool is_next = tile < columns.last_tile;
      float scores[4] = {0, 0, 0, 0};
      mine.multiply_keys(slot, shared_queries, scores);
#ifndef LATE
      if (is_next) mine.load_keys(slot, keys, next, tile * kTile, columns);
#endif
      mine.add_values(slot, current * kTile, columns, scale, cap, scores);
#ifdef LATE
      if (is_next) mine.load_keys(slot, keys, next, tile * kTile, columns);
#endif
      if (is_next) mine.load_values(slot, values, next, tile * kTile, columns);
      current += WARPS, tile += WARPS;
      if (tile < columns.last_tile) page = pages[tile * kTile / PAGE];
    }
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
