/* Plain CBLAS names over an OpenBLAS whose functions are handed in, so that any build of it serves MLX.
 *
 * Products of few rows go to the matrix-vector kernel: OpenBLAS packs the whole matrix first, which costs more
 * than it saves below four rows. Integers are 32 bits; enum values are CBLAS's.
 */
#include <stddef.h>

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112, FEW_ROWS = 3 };

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

/* Called once, before any product. */
void mlxd_bind(sgemm_fn *s, dgemm_fn *d, cgemm_fn *c, sgemv_fn *v) {
    sgemm = s;
    dgemm = d;
    cgemm = c;
    sgemv = v;
}

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
    if (order != ROW_MAJOR || m > FEW_ROWS) {
        sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
        return;
    }
    /* Row i of the product is op(b)' times row i of op(a). */
    int b_stored_plain = trans_b == NO_TRANS;
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
