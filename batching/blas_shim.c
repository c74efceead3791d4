/* Plain CBLAS names over an OpenBLAS whose functions are handed in, so that any build of it serves MLX.
 *
 * OpenBLAS packs a matrix before it multiplies, which costs more than it saves for a few rows. Where the processor has
 * AVX-512, products of those are computed here, and those of any number of rows with a transposed matrix, which is how
 * weights lie: each number of a product is summed in one order, however many rows there are. Elsewhere products of less
 * than four rows are matrix-vector products. Integers are 32 bits; enum values are CBLAS's.
 */
#include <stddef.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };
enum { FEW_ROWS = 8, FEW_VECTORS = 3 }; /* up to which our own loops are the fastest, and products one by one */
enum { SMALL = 1 << 15 }; /* numbers in a matrix that is not worth several threads */

typedef void sgemm_fn(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
typedef void dgemm_fn(int, int, int, int, int, int, double, const double *, int, const double *, int, double, double *,
                      int);
typedef void cgemm_fn(int, int, int, int, int, int, const void *, const void *, int, const void *, int, const void *,
                      void *, int);
typedef void sgemv_fn(int, int, int, int, float, const float *, int, const float *, int, float, float *, int);

static sgemm_fn *sgemm;
static dgemm_fn *dgemm;
static cgemm_fn *cgemm;
static sgemv_fn *sgemv;
static int has_avx512, has_threads;

/* Called once, before any product. threads: that OpenBLAS may use. */
void mlxd_bind(sgemm_fn *s, dgemm_fn *d, cgemm_fn *c, sgemv_fn *v, int threads) {
    sgemm = s;
    dgemm = d;
    cgemm = c;
    sgemv = v;
    has_threads = threads > 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    has_avx512 = __builtin_cpu_supports("avx512f");
#endif
}

#if defined(__x86_64__)

/* A tile of the product is ROWS x COLUMNS numbers, or ROWS x VECTORS times LANES, whose sums stay in registers. */
enum { LANES = 16, ROWS = 4, COLUMNS = 6, VECTORS = 4 };
enum { BLOCK_ROWS = 64, BLOCK_COLUMNS = 192, DEPTH = 640 }; /* multiplied at once, from the processor's cache */
enum { SOON = 2048 }; /* numbers from where a matrix is read to where it is fetched from memory, at least */

#define AVX512 __attribute__((target("avx512f")))
#define TILED static inline __attribute__((always_inline)) AVX512
#define UNROLLED _Pragma("GCC unroll 8") for

typedef struct {
    int k, lda, ldb, ldc;
    float alpha, beta;
} shape;

TILED void fetch(const float *from) { _mm_prefetch((const char *)from, _MM_HINT_T0); }

TILED int least(int a, int b) { return a < b ? a : b; }

TILED __m512 add_numbers(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}

TILED __m512 add_pairs(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
}

/* The sum of each of COLUMNS vectors, in the first numbers of one. */
TILED __m512 sum_each(const __m512 *x) {
    const __m512 ef = add_numbers(x[4], x[5]);
    const __m512 abcd = add_pairs(add_numbers(x[0], x[1]), add_numbers(x[2], x[3])), efef = add_pairs(ef, ef);
    const __m512 halves = _mm512_add_ps(_mm512_shuffle_f32x4(abcd, efef, 0x44), _mm512_shuffle_f32x4(abcd, efef, 0xEE));
    return _mm512_add_ps(_mm512_shuffle_f32x4(halves, halves, 0x08), _mm512_shuffle_f32x4(halves, halves, 0x0D));
}

/* The first n numbers of x. Whole tiles do without a mask, which is slow where a store reaches into another line. */
TILED void put(float *c, const int n, __m512 x, shape s) {
    const __mmask16 first = (1 << n) - 1;
    x = _mm512_mul_ps(x, _mm512_set1_ps(s.alpha));
    if (s.beta) x = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(first, c), _mm512_set1_ps(s.beta), x);
    if (n == LANES) {
        _mm512_storeu_ps(c, x);
    } else if (n == COLUMNS) {
        _mm_storeu_ps(c, _mm512_castps512_ps128(x));
        _mm_storel_pi((__m64 *)(c + 4), _mm512_extractf32x4_ps(x, 1));
    } else {
        _mm512_mask_storeu_ps(c, first, x);
    }
}

/* [m, k] times the transpose of [n, k]; m at most ROWS, n at most COLUMNS, k whole LANES.
 * soon: where to fetch what comes after, num_soon columns of it; all that a tile reads where m is below ROWS. */
TILED void multiply_transposed(const int m, const int n, const float *a, const float *b, const float *soon,
                               int num_soon, float *c, shape s) {
    __m512 sums[ROWS][COLUMNS];
    const float *columns[COLUMNS];
    UNROLLED(int j = 0; j < COLUMNS; j++) columns[j] = b + (size_t)least(j, n - 1) * s.ldb;
    UNROLLED(int i = 0; i < m; i++)
        UNROLLED(int j = 0; j < COLUMNS; j++) sums[i][j] = _mm512_setzero_ps();
    for (int x = 0; x < s.k; x += LANES) {
        __m512 right[COLUMNS];
        if (m < ROWS) {
            UNROLLED(int j = 0; j < COLUMNS; j++) fetch(soon + (size_t)j * s.ldb + x);
        } else {
            for (int j = 0; j < num_soon; j++) fetch(soon + (size_t)j * s.ldb + x);
        }
        UNROLLED(int j = 0; j < COLUMNS; j++) right[j] = _mm512_loadu_ps(columns[j] + x);
        UNROLLED(int i = 0; i < m; i++) {
            const __m512 left = _mm512_loadu_ps(a + (size_t)i * s.lda + x);
            UNROLLED(int j = 0; j < COLUMNS; j++) sums[i][j] = _mm512_fmadd_ps(left, right[j], sums[i][j]);
        }
    }
    UNROLLED(int i = 0; i < m; i++) put(c + (size_t)i * s.ldc, n, sum_each(sums[i]), s);
}

/* [m, k] times [k, n * LANES]; m at most ROWS, n at most VECTORS. */
TILED void multiply_plain(const int m, const int n, const float *a, const float *b, float *c, shape s) {
    __m512 sums[ROWS][VECTORS];
    UNROLLED(int i = 0; i < m; i++)
        UNROLLED(int j = 0; j < n; j++) sums[i][j] = _mm512_setzero_ps();
    for (int x = 0; x < s.k; x++) {
        __m512 right[VECTORS];
        UNROLLED(int j = 0; j < n; j++) {
            const float *from = b + (size_t)x * s.ldb + j * LANES;
            fetch(from + SOON);
            right[j] = _mm512_loadu_ps(from);
        }
        UNROLLED(int i = 0; i < m; i++) {
            const __m512 left = _mm512_set1_ps(a[(size_t)i * s.lda + x]);
            UNROLLED(int j = 0; j < n; j++) sums[i][j] = _mm512_fmadd_ps(left, right[j], sums[i][j]);
        }
    }
    UNROLLED(int i = 0; i < m; i++)
        UNROLLED(int j = 0; j < n; j++) put(c + (size_t)i * s.ldc + j * LANES, LANES, sums[i][j], s);
}

#define FOR_ROWS(tile, n)          \
    switch (m - i) {               \
        case 1: tile(1, n); break; \
        case 2: tile(2, n); break; \
        case 3: tile(3, n); break; \
        default: tile(ROWS, n);    \
    }
#define PLAIN(m, n) multiply_plain(m, n, a + (size_t)i * s.lda, b + j, c + (size_t)i * s.ldc + j, s)
#define TRANSPOSED(m, n)                                                                                           \
    multiply_transposed(m, n, a + (size_t)i * s.lda, b + (size_t)j * s.ldb, soon, num_soon, c + (size_t)i * s.ldc + j, \
                        s)

/* n whole LANES. */
AVX512 static void multiply_rows_plain(int m, int n, const float *a, const float *b, float *c, shape s) {
    int j = 0;
    for (; n - j >= VECTORS * LANES; j += VECTORS * LANES)
        for (int i = 0; i < m; i += ROWS) FOR_ROWS(PLAIN, VECTORS)
    for (; j < n; j += LANES)
        for (int i = 0; i < m; i += ROWS) FOR_ROWS(PLAIN, 1)
}

/* One block at most. The tiles of the same columns share the fetching of later ones. */
AVX512 static void multiply_block(int m, int n, const float *a, const float *b, float *c, shape s) {
    const int num_tiles = (m + ROWS - 1) / ROWS;
    const int num_soon = num_tiles < COLUMNS ? (COLUMNS + num_tiles - 1) / num_tiles : 1;
    const int ahead = s.k * COLUMNS < SOON ? SOON / s.k : COLUMNS;
    for (int j = 0; j < n; j += COLUMNS) {
        for (int i = 0; i < m; i += ROWS) {
            const float *soon = b + (size_t)(j + ahead + i / ROWS * num_soon % COLUMNS) * s.ldb;
            if (n - j >= COLUMNS) {
                FOR_ROWS(TRANSPOSED, COLUMNS)
            } else {
                FOR_ROWS(TRANSPOSED, n - j)
            }
        }
    }
}

/* k whole LANES. Block by block; where a number's sum is divided depends on k alone. */
AVX512 static void multiply_rows_transposed(int m, int n, const float *a, const float *b, float *c, shape whole) {
    const int parts = (whole.k + DEPTH - 1) / DEPTH;
    const int depth = ((whole.k + parts - 1) / parts + LANES - 1) / LANES * LANES;
    for (int j = 0; j < n; j += BLOCK_COLUMNS)
        for (int x = 0; x < whole.k; x += depth) {
            shape s = whole;
            s.k = least(depth, whole.k - x);
            s.beta = x ? 1 : whole.beta;
            for (int i = 0; i < m; i += BLOCK_ROWS)
                multiply_block(least(BLOCK_ROWS, m - i), least(BLOCK_COLUMNS, n - j), a + (size_t)i * s.lda + x,
                               b + (size_t)j * s.ldb + x, c + (size_t)i * s.ldc + j, s);
        }
}

#endif

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
    const int b_stored_plain = trans_b == NO_TRANS;
#if defined(__x86_64__)
    const shape s = {k, lda, ldb, ldc, alpha, beta};
    const int is_ours = has_avx512 && order == ROW_MAJOR && trans_a == NO_TRANS &&
                        (!has_threads || (size_t)n * k <= SMALL);
    if (is_ours && !b_stored_plain && k > 0 && k % LANES == 0) {
        multiply_rows_transposed(m, n, a, b, c, s);
        return;
    }
    if (is_ours && b_stored_plain && n % LANES == 0 && m <= FEW_ROWS) {
        multiply_rows_plain(m, n, a, b, c, s);
        return;
    }
#endif
    if (order != ROW_MAJOR || m > FEW_VECTORS) {
        sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
        return;
    }
    /* Row i of the product is op(b)' times row i of op(a). */
    for (int i = 0; i < m; i++) {
        const float *row = trans_a == NO_TRANS ? a + (size_t)i * lda : a + i;
        sgemv(ROW_MAJOR, b_stored_plain ? TRANS : NO_TRANS, b_stored_plain ? k : n, b_stored_plain ? n : k, alpha, b,
              ldb, row, trans_a == NO_TRANS ? 1 : lda, beta, c + (size_t)i * ldc, 1);
    }
}

void cblas_dgemm(int order, int trans_a, int trans_b, int m, int n, int k, double alpha, const double *a, int lda,
                 const double *b, int ldb, double beta, double *c, int ldc) {
    dgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(int order, int trans_a, int trans_b, int m, int n, int k, const void *alpha, const void *a, int lda,
                 const void *b, int ldb, const void *beta, void *c, int ldc) {
    cgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
