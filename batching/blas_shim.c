/* Plain CBLAS names over an OpenBLAS whose functions are handed in, so that any build of it serves MLX.
 *
 * OpenBLAS packs the matrix before it multiplies, which costs more than it saves for a few rows: products of those are
 * computed here where the processor has AVX-512, else, below four rows, as matrix-vector products. Integers are 32 bits;
 * enum values are CBLAS's.
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

enum { LANES = 16, TILE = 4, SOON = 512 };

#define AVX512 __attribute__((target("avx512f")))
#define TILED static inline __attribute__((always_inline)) AVX512
#define UNROLLED _Pragma("GCC unroll 4") for

typedef struct {
    int k, lda, ldb, ldc;
    float alpha, beta;
} shape;

/* Of a matrix: what comes soon is fetched, since the processor's own fetching ends with each 4 KiB. */
TILED __m512 load(const float *from) {
    _mm_prefetch((const char *)(from + SOON), _MM_HINT_T0);
    return _mm512_loadu_ps(from);
}

static inline void put(float *c, float x, shape s) { *c = s.alpha * x + (s.beta ? s.beta * *c : 0); }

/* [m, k] times the transpose of [n, k]; m and n at most TILE, k whole LANES. */
TILED void multiply_transposed(const int m, const int n, const float *a, const float *b, float *c, shape s) {
    __m512 sums[TILE][TILE];
    UNROLLED(int i = 0; i < m; i++)
        UNROLLED(int j = 0; j < n; j++) sums[i][j] = _mm512_setzero_ps();
    for (int x = 0; x < s.k; x += LANES) {
        __m512 right[TILE];
        UNROLLED(int j = 0; j < n; j++) right[j] = load(b + (size_t)j * s.ldb + x);
        UNROLLED(int i = 0; i < m; i++) {
            const __m512 left = _mm512_loadu_ps(a + (size_t)i * s.lda + x);
            UNROLLED(int j = 0; j < n; j++) sums[i][j] = _mm512_fmadd_ps(left, right[j], sums[i][j]);
        }
    }
    UNROLLED(int i = 0; i < m; i++)
        UNROLLED(int j = 0; j < n; j++) put(c + (size_t)i * s.ldc + j, _mm512_reduce_add_ps(sums[i][j]), s);
}

/* [m, k] times [k, n * LANES]; m and n at most TILE. */
TILED void multiply_plain(const int m, const int n, const float *a, const float *b, float *c, shape s) {
    __m512 sums[TILE][TILE];
    UNROLLED(int i = 0; i < m; i++)
        UNROLLED(int j = 0; j < n; j++) sums[i][j] = _mm512_setzero_ps();
    for (int x = 0; x < s.k; x++) {
        __m512 right[TILE];
        UNROLLED(int j = 0; j < n; j++) right[j] = load(b + (size_t)x * s.ldb + j * LANES);
        UNROLLED(int i = 0; i < m; i++) {
            const __m512 left = _mm512_set1_ps(a[(size_t)i * s.lda + x]);
            UNROLLED(int j = 0; j < n; j++) sums[i][j] = _mm512_fmadd_ps(left, right[j], sums[i][j]);
        }
    }
    UNROLLED(int i = 0; i < m; i++)
        UNROLLED(int j = 0; j < n; j++) {
            float numbers[LANES];
            _mm512_storeu_ps(numbers, sums[i][j]);
            for (int l = 0; l < LANES; l++) put(c + (size_t)i * s.ldc + j * LANES + l, numbers[l], s);
        }
}

#define FOR_ROWS(multiply, n)                              \
    switch (m - i) {                                       \
        case 1: multiply(1, n, a_i, b, c_i, s); break;     \
        case 2: multiply(2, n, a_i, b, c_i, s); break;     \
        case 3: multiply(3, n, a_i, b, c_i, s); break;     \
        default: multiply(TILE, n, a_i, b, c_i, s); break; \
    }

/* A few rows times a matrix. Each number of the product is summed in one order, however many rows there are. */
AVX512 static void multiply_few(int m, int n, int b_stored_plain, const float *a, const float *b, float *c, shape s) {
    const int unit = b_stored_plain ? LANES : 1;
    for (int left = n / unit; left > 0;) {
        const int done = left >= TILE ? TILE : 1;
        for (int i = 0; i < m; i += TILE) {
            const float *a_i = a + (size_t)i * s.lda;
            float *c_i = c + (size_t)i * s.ldc;
            if (b_stored_plain && done == TILE) {
                FOR_ROWS(multiply_plain, TILE)
            } else if (b_stored_plain) {
                FOR_ROWS(multiply_plain, 1)
            } else if (done == TILE) {
                FOR_ROWS(multiply_transposed, TILE)
            } else {
                FOR_ROWS(multiply_transposed, 1)
            }
        }
        left -= done;
        b += b_stored_plain ? (size_t)done * LANES : (size_t)done * s.ldb;
        c += (size_t)done * unit;
    }
}

#endif

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
    const int b_stored_plain = trans_b == NO_TRANS;
#if defined(__x86_64__)
    const int is_whole = trans_a == NO_TRANS && (b_stored_plain ? n : k) % LANES == 0;
    const int is_ours = has_avx512 && is_whole && (!has_threads || (size_t)n * k <= SMALL);
    if (order == ROW_MAJOR && m <= FEW_ROWS && is_ours) {
        multiply_few(m, n, b_stored_plain, a, b, c, (shape){k, lda, ldb, ldc, alpha, beta});
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
