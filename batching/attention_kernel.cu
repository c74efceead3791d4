// Decode attention over pages: one position a row is written and attends; keys and values are read where they lie,
// once for all the query heads that share them. Follows weighted_sums.cu and page_cells.cu.
//
// A block owns one row, one KV head with up to 8 of its query heads, and one part of the row's columns; its warps take
// tiles of 16 columns by turns.

namespace mlxd {

constexpr int kTile = 16;
constexpr int kHeads = 8;

// The columns [begin, end) that a row attends to, and the tiles of them that this block takes.
struct Columns {
  int begin, end, first_tile, last_tile;
  int written;  // past those of this block's that lie in their pages already, which the row's last one does not

  // shortest: tiles of a part below which a row is not divided further.
  __device__ Columns(int last, int window, int shortest) {
    end = last + 1, begin = window ? max(0, end - window) : 0;
    const int first = begin / kTile, past = (end + kTile - 1) / kTile, parts = gridDim.x;
    const int count = max(shortest, (past - first + parts - 1) / parts);
    first_tile = first + blockIdx.x * count;
    last_tile = min(past, first_tile + count);
    written = min(end - 1, last_tile * kTile);
  }

  __device__ bool hold(int column) const { return column >= begin && column < end; }

  __device__ bool hold_written(int column) const { return column >= begin && column < written; }

  __device__ bool hold_last() const { return first_tile < last_tile && last_tile * kTile >= end; }
};

// Where the cells of one KV head lie in a row's pages.
template <int PAGE>
struct Pages {
  const int32_t* of_row;
  int kv_heads, kv_head;

  __device__ int at(int column, bool is_there) const { return is_there ? of_row[column / PAGE] : 0; }

  __device__ size_t cell(int page, int column) const {
    return (static_cast<size_t>(page) * kv_heads + kv_head) * PAGE + column % PAGE;
  }
};

// One lane's words of a tile of columns, and what is made of them for 8 query heads.
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
  uint32_t key[2][kKeyChunks][4];
  uint32_t value[kValueChunks][4][kWords];
  Sums<VALUE_DIM / 16> sums;

  __device__ Lane() : lane(threadIdx.x % kLanes), warp(threadIdx.x / kLanes), g(lane / 4), t(lane % 4) {
    sums.clear();
  }

  template <typename Keys>
  __device__ void load_key(int i, const Keys& keys, size_t cell, bool is_there) {
#pragma unroll
    for (int c = 0; c < kKeyChunks; c++) keys.load(key[i][c], cell, c * kKeyChunk + t * 4 * kPerWord, is_there);
  }

  template <typename Values>
  __device__ void load_value(int i, const Values& values, size_t cell, bool is_there) {
#pragma unroll
    for (int c = 0; c < kValueChunks; c++) values.load(value[c][i], cell, c * kValueChunk + g * kMine, is_there);
  }

  // cell: of the tile's first column.
  template <typename Keys>
  __device__ void load_keys(const Keys& keys, size_t cell, int column, const Columns& columns) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int j = g + 8 * i;
      load_key(i, keys, cell + j, columns.hold_written(column + j));
    }
  }

  template <typename Values>
  __device__ void load_values(const Values& values, size_t cell, int column, const Columns& columns) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int j = Weighing<T>::column(i, t);
      load_value(i, values, cell + j, columns.hold_written(column + j));
    }
  }

  // Puts the first of these cells in the j-th column's place.
  template <typename Keys, typename Values>
  __device__ void load_new(const Keys& keys, const Values& values, int j) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (g + 8 * i == j) load_key(i, keys, 0, true);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (Weighing<T>::column(i, t) == j) load_value(i, values, 0, true);
    }
  }

  // queries: [8, KEY_DIM], read anew for each tile: there are no registers to keep them in.
  __device__ void multiply_keys(const T* queries, float (&scores)[4]) const {
#pragma unroll
    for (int c = 0; c < kKeyChunks; c++) {
      uint32_t query[4];
      load(query, queries + g * KEY_DIM + c * kKeyChunk + t * 4 * kPerWord, true);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const uint32_t a[4] = {key[0][c][j], key[1][c][j], key[0][c][j + 1], key[1][c][j + 1]};
        const uint32_t b[2] = {query[j], query[j + 1]};
        mma(scores, a, b, T());
      }
    }
  }

  __device__ void add_values(int column, const Columns& columns, float scale, float cap, float (&scores)[4]) {
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
//
// A block first asks for all it starts with, and only then waits for any of it; a warp asks for what it reads next
// before it computes.
template <typename T, int GROUP, int KEY_DIM, int VALUE_DIM, int PAGE, int WARPS, typename Queries, typename Key,
          typename Value, typename Keys, typename Values, typename Result>
__device__ void attend(Queries queries, Key key, Value value, Keys keys, Values values, const int32_t* table,
                       int width, const int32_t* last, int window, int shortest, float scale, float cap,
                       Result result) {
  static_assert(PAGE % kTile == 0, "a tile lies in one page");
  constexpr int kBlocks = (GROUP + kHeads - 1) / kHeads, kThreads = WARPS * kLanes, kStep = WARPS * kTile;
  const int row = blockIdx.z, kv_heads = gridDim.y / kBlocks, kv_head = blockIdx.y / kBlocks;
  const int first_head = blockIdx.y % kBlocks * kHeads, count = min(kHeads, GROUP - first_head);
  alignas(16) __shared__ T shared_queries[kHeads * KEY_DIM], shared_key[KEY_DIM], shared_value[VALUE_DIM];
  const auto share = queries.template share<KEY_DIM, kHeads, kThreads>(row, kv_head * GROUP + first_head, count);
  const NewCell<Key, KEY_DIM, kThreads> new_key(key, shared_key, row, kv_head, kv_heads);
  const NewCell<Value, VALUE_DIM, kThreads> new_value(value, shared_value, row, kv_head, kv_heads);

  const Columns columns(last[row], window, shortest);
  const Pages<PAGE> pages{table + static_cast<size_t>(row) * width, kv_heads, kv_head};
  const int end = columns.last_tile * kTile, new_column = columns.end - 1;
  const int new_page = pages.at(new_column, columns.hold_last());
  Lane<T, GROUP, KEY_DIM, VALUE_DIM, WARPS> mine;
  int column = (columns.first_tile + mine.warp) * kTile, page = pages.at(column, column < end);
  mine.load_keys(keys, pages.cell(page, column), column, columns);
  mine.load_values(values, pages.cell(page, column), column, columns);
  page = pages.at(column + kStep, column + kStep < end);

  share.store(shared_queries), new_key.store(), new_value.store();
  __syncthreads();
  if (columns.hold_last()) {
    keys.take(pages.cell(new_page, new_column), new_key.cells);
    values.take(pages.cell(new_page, new_column), new_value.cells);
  }
  for (int next = column + kStep; column < end; column = next, next += kStep) {
    const size_t cell = pages.cell(page, next);
    if (column / kTile == new_column / kTile) mine.load_new(new_key.cells, new_value.cells, new_column % kTile);
    float scores[4] = {0, 0, 0, 0};
    mine.multiply_keys(shared_queries, scores);
    if (next < end) mine.load_keys(keys, cell, next, columns);
    mine.add_values(column, columns, scale, cap, scores);
    if (next < end) mine.load_values(values, cell, next, columns);
    page = pages.at(next + kStep, next + kStep < end);
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
