// What a cell of a page, one position of one head, holds: DIM keys or values. Follows rotary_heads.cu.
//
// `load` gives words of T from a cell's dimension `dim` on, zeros where there is nothing; `take` fills a cell with the
// first of others, by all threads of a block.

namespace mlxd {

template <int COUNT, typename T>
__device__ inline void copy(T* to, const T* from) {
  for (int i = threadIdx.x; i < COUNT; i += blockDim.x) to[i] = from[i];
}

// Numbers as they are.
template <typename T, int DIM>
struct Dense {
  T* numbers;

  template <int WORDS>
  __device__ void load(uint32_t (&words)[WORDS], size_t cell, int dim, bool is_there) const {
    mlxd::load(words, numbers + cell * DIM + dim, is_there);
  }

  __device__ void take(size_t cell, const Dense& from) const { copy<DIM>(numbers + cell * DIM, from.numbers); }
};

// MLX's affine quantisation: numbers are code * scale + bias, of BITS bits; SHARING neighbours share scale and bias.
template <typename T, int DIM, int BITS, int SHARING>
struct Packed {
  static_assert(sizeof(T) == 2 && SHARING % 8 == 0, "a lane's 8 numbers share scale and bias");
  static constexpr int kCodes = DIM * BITS / 32, kScales = DIM / SHARING;

  uint32_t* codes;
  T* scales;
  T* biases;

  __device__ void load(uint32_t (&words)[4], size_t cell, int dim, bool is_there) const {
    const uint32_t* from = codes + cell * kCodes + dim * BITS / 32;
    const size_t group = cell * kScales + dim / SHARING;
    uint32_t code[BITS / 4] = {};
    float scale = 0, bias = 0;
    if (is_there) {
      if constexpr (BITS == 8) {
        const uint2 x = *reinterpret_cast<const uint2*>(from);
        code[0] = x.x, code[1] = x.y;
      } else {
        code[0] = *from;
      }
      scale = static_cast<float>(scales[group]), bias = static_cast<float>(biases[group]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      words[i] = pack(number(code, 2 * i) * scale + bias, number(code, 2 * i + 1) * scale + bias, T());
    }
  }

  __device__ void take(size_t cell, const Packed& from) const {
    mlxd::copy<kCodes>(codes + cell * kCodes, from.codes);
    copy<kScales>(scales + cell * kScales, from.scales);
    copy<kScales>(biases + cell * kScales, from.biases);
  }

  __device__ Packed from(size_t cell) const {
    return {codes + cell * kCodes, scales + cell * kScales, biases + cell * kScales};
  }

 private:
  // A code as the low bits of 2^23 + code is exact, and cheaper than a conversion.
  static __device__ float number(const uint32_t (&code)[BITS / 4], int i) {
    constexpr uint32_t kMagic = 0x4b000000u;
    const uint32_t bits = BITS == 8 ? __byte_perm(code[i / 4], kMagic, 0x7440 + i % 4)
                                    : (code[0] >> 4 * i & 15u) | kMagic;
    return __uint_as_float(bits) - 8388608.0f;
  }
};

// Keys or values of one head of a row's new position, as the first of `cells`. A block of THREADS threads reads them at
// its start, and stores them in shared memory once it has asked for all else.
template <typename From, int DIM, int THREADS>
struct NewCell;

template <typename T, typename Rotation, int DIM, int THREADS>
struct NewCell<Heads<T, Rotation>, DIM, THREADS> {
  Share<T, DIM, 1, THREADS, Rotation> share;
  Dense<T, DIM> cells;

  __device__ NewCell(const Heads<T, Rotation>& heads, T* shared, int row, int head, int)
      : share(heads.template share<DIM, 1, THREADS>(row, head, 1)), cells{shared} {}

  __device__ void store() const { share.store(cells.numbers); }
};

// Packed ones, cells of [rows, heads], are read where they lie.
template <typename T, int DIM, int BITS, int SHARING, int THREADS>
struct NewCell<Packed<T, DIM, BITS, SHARING>, DIM, THREADS> {
  Packed<T, DIM, BITS, SHARING> cells;

  __device__ NewCell(const Packed<T, DIM, BITS, SHARING>& all, T*, int row, int head, int heads)
      : cells(all.from(static_cast<size_t>(row) * heads + head)) {}

  __device__ void store() const {}
};

}  // namespace mlxd
