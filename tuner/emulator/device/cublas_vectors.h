/* The rest of cuBLAS (part of cublas.c): vectors, matrix by vector, triangular solves, and batches
 * of small factorizations. They are noted under their names with the sizes that they were given.
 *
 * A function declares the arguments up to the last one that it looks at; by the calling conventions
 * of Linux a caller may pass more. What a program may look at is set: results that are scalars,
 * error codes (0) and pivots (rows as they are).
 */
#ifndef TUNER_CUBLAS_VECTORS_H
#define TUNER_CUBLAS_VECTORS_H

static int noted(struct handle *h, const char *name, int64_t m, int64_t n, int type) {
  return product(h, name, m, n, 1, 1, type, type == R_64F || type == C_64F ? COMPUTE_64F
                                                                           : COMPUTE_32F);
}

/* A scalar result on the host or, by the pointer mode, on the device (which is mapped memory). */
static void set_one(void *result, int type) {
  const float f[2] = {1, 0};
  const double d[2] = {1, 0};
  const uint16_t half = 0x3c00, bfloat16 = 0x3f80;
  switch (result ? type : -1) {
    case R_32F: memcpy(result, f, sizeof f[0]); break;
    case R_64F: memcpy(result, d, sizeof d[0]); break;
    case C_32F: memcpy(result, f, sizeof f); break;
    case C_64F: memcpy(result, d, sizeof d); break;
    case R_16F: memcpy(result, &half, sizeof half); break;
    case 14: memcpy(result, &bfloat16, sizeof bfloat16); break; /* CUDA_R_16BF */
    default: break;
  }
}

#define ON_N(name, I, type) /* (handle, n, ...) */                       \
  EMU_EXPORT int name(struct handle *h, I n) {                           \
    return noted(h, #name, n, 1, type);                                  \
  }
#define ON_MN(name, I, type) /* (handle, m, n, ...) */                   \
  EMU_EXPORT int name(struct handle *h, I m, I n) {                      \
    return noted(h, #name, m, n, type);                                  \
  }
#define ON_FLAG_N(name, I, type) /* (handle, flag, n, ...) */            \
  EMU_EXPORT int name(struct handle *h, int flag, I n) {                 \
    (void)flag;                                                          \
    return noted(h, #name, n, n, type);                                  \
  }
#define ON_FLAG_MN(name, I, type) /* (handle, flag, m, n, ...) */        \
  EMU_EXPORT int name(struct handle *h, int flag, I m, I n) {            \
    (void)flag;                                                          \
    return noted(h, #name, m, n, type);                                  \
  }
#define ON_2FLAGS_MN(name, I, type) /* (handle, 2 flags, m, n, ...) */   \
  EMU_EXPORT int name(struct handle *h, int f1, int f2, I m, I n) {      \
    (void)f1, (void)f2;                                                  \
    return noted(h, #name, m, n, type);                                  \
  }
#define ON_3FLAGS_N(name, I, type) /* (handle, 3 flags, n, ...) */       \
  EMU_EXPORT int name(struct handle *h, int f1, int f2, int f3, I n) {   \
    (void)f1, (void)f2, (void)f3;                                        \
    return noted(h, #name, n, n, type);                                  \
  }
#define ON_4FLAGS_MN(name, I, type) /* (handle, 4 flags, m, n, ...) */   \
  EMU_EXPORT int name(struct handle *h, int f1, int f2, int f3, int f4, I m, I n) { \
    (void)f1, (void)f2, (void)f3, (void)f4;                              \
    return noted(h, #name, m, n, type);                                  \
  }
#define REDUCED(name, I, type) /* (handle, n, x, incx, result) */        \
  EMU_EXPORT int name(struct handle *h, I n, const void *x, I incx, void *result) { \
    (void)x, (void)incx;                                                 \
    set_one(result, type);                                               \
    return noted(h, #name, n, 1, type);                                  \
  }
#define DOT(name, I, type) /* (handle, n, x, incx, y, incy, result) */   \
  EMU_EXPORT int name(struct handle *h, I n, const void *x, I incx, const void *y, I incy, \
                      void *result) {                                    \
    (void)x, (void)incx, (void)y, (void)incy;                            \
    set_one(result, type);                                               \
    return noted(h, #name, n, 1, type);                                  \
  }
#define INDEX(name, I, type) /* the first element, counted from 1 */     \
  EMU_EXPORT int name(struct handle *h, I n, const void *x, I incx, I *result) { \
    (void)x, (void)incx;                                                 \
    if (result) *result = n > 0;                                         \
    return noted(h, #name, n, 1, type);                                  \
  }

/* 32 and 64 bit sizes; then the types that a family has. */
#define SIZES(KIND, name, type) KIND(name##_v2, int, type) KIND(name##_v2_64, int64_t, type)
#define SIZES_(KIND, name, type) KIND(name, int, type) KIND(name##_64, int64_t, type)
#define REAL(KIND, name) SIZES(KIND, cublasS##name, R_32F) SIZES(KIND, cublasD##name, R_64F)
#define COMPLEX(KIND, name) SIZES(KIND, cublasC##name, C_32F) SIZES(KIND, cublasZ##name, C_64F)
#define ALL(KIND, name) REAL(KIND, name) COMPLEX(KIND, name)
#define ALL_(KIND, name)                                             \
  SIZES_(KIND, cublasS##name, R_32F) SIZES_(KIND, cublasD##name, R_64F) \
  SIZES_(KIND, cublasC##name, C_32F) SIZES_(KIND, cublasZ##name, C_64F)

ALL(ON_N, axpy) ALL(ON_N, copy) ALL(ON_N, scal) ALL(ON_N, swap) ALL(ON_N, rot) REAL(ON_N, rotm)
SIZES(ON_N, cublasCsscal, C_32F) SIZES(ON_N, cublasZdscal, C_64F)
SIZES(ON_N, cublasCsrot, C_32F) SIZES(ON_N, cublasZdrot, C_64F)
REAL(DOT, dot) COMPLEX(DOT, dotu) COMPLEX(DOT, dotc)
REAL(REDUCED, nrm2) REAL(REDUCED, asum)
SIZES(REDUCED, cublasScnrm2, R_32F) SIZES(REDUCED, cublasDznrm2, R_64F)
SIZES(REDUCED, cublasScasum, R_32F) SIZES(REDUCED, cublasDzasum, R_64F)
SIZES(INDEX, cublasIsamax, R_32F) SIZES(INDEX, cublasIdamax, R_64F)
SIZES(INDEX, cublasIcamax, C_32F) SIZES(INDEX, cublasIzamax, C_64F)
SIZES(INDEX, cublasIsamin, R_32F) SIZES(INDEX, cublasIdamin, R_64F)
SIZES(INDEX, cublasIcamin, C_32F) SIZES(INDEX, cublasIzamin, C_64F)

ALL(ON_FLAG_MN, gemv) REAL(ON_MN, ger) COMPLEX(ON_MN, geru) COMPLEX(ON_MN, gerc)
ALL_(ON_FLAG_MN, gemvBatched) ALL_(ON_FLAG_MN, gemvStridedBatched)
ALL(ON_FLAG_N, symv) ALL(ON_FLAG_N, syr) ALL(ON_FLAG_N, syr2)
COMPLEX(ON_FLAG_N, hemv) COMPLEX(ON_FLAG_N, her) COMPLEX(ON_FLAG_N, her2)
ALL(ON_3FLAGS_N, trmv) ALL(ON_3FLAGS_N, trsv)

ALL(ON_2FLAGS_MN, symm) COMPLEX(ON_2FLAGS_MN, hemm)
ALL(ON_2FLAGS_MN, syrk) ALL(ON_2FLAGS_MN, syr2k) COMPLEX(ON_2FLAGS_MN, herk)
COMPLEX(ON_2FLAGS_MN, her2k) ALL_(ON_2FLAGS_MN, geam) ALL_(ON_FLAG_MN, dgmm)
ALL(ON_4FLAGS_MN, trmm) ALL(ON_4FLAGS_MN, trsm) ALL_(ON_4FLAGS_MN, trsmBatched)

EMU_EXPORT int cublasDotEx(struct handle *h, int n, const void *x, int xtype, int incx,
                           const void *y, int ytype, int incy, void *result, int type) {
  (void)x, (void)xtype, (void)incx, (void)y, (void)ytype, (void)incy;
  set_one(result, type);
  return noted(h, "cublasDotEx", n, 1, type);
}

EMU_EXPORT int cublasNrm2Ex(struct handle *h, int n, const void *x, int xtype, int incx,
                            void *result, int type) {
  (void)x, (void)xtype, (void)incx;
  set_one(result, type);
  return noted(h, "cublasNrm2Ex", n, 1, type);
}

/* -- batches of factorizations ------------------------------------------------------------------ */

static void set_zero(int *info, int count) {
  if (info && count > 0) memset(info, 0, (size_t)count * sizeof *info);
}

static void keep_rows(int *pivots, int n, int batches) {
  for (int b = 0; pivots && b < batches; b++)
    for (int i = 0; i < n; i++) pivots[b * n + i] = i + 1;
}

#define FACTORIZATIONS(X, type)                                                                 \
  EMU_EXPORT int cublas##X##getrfBatched(struct handle *h, int n, void *a, int lda, int *pivots, \
                                         int *info, int batches) {                              \
    (void)a, (void)lda;                                                                         \
    keep_rows(pivots, n, batches);                                                              \
    set_zero(info, batches); /* of the device */                                                \
    return product(h, "cublas" #X "getrfBatched", n, n, n, batches, type, 0);                   \
  }                                                                                             \
  EMU_EXPORT int cublas##X##getriBatched(struct handle *h, int n, const void *a, int lda,       \
                                         const int *pivots, void *c, int ldc, int *info,        \
                                         int batches) {                                         \
    (void)a, (void)lda, (void)pivots, (void)c, (void)ldc;                                       \
    set_zero(info, batches);                                                                    \
    return product(h, "cublas" #X "getriBatched", n, n, n, batches, type, 0);                   \
  }                                                                                             \
  EMU_EXPORT int cublas##X##matinvBatched(struct handle *h, int n, const void *a, int lda,      \
                                          void *inverse, int ldi, int *info, int batches) {     \
    (void)a, (void)lda, (void)inverse, (void)ldi;                                               \
    set_zero(info, batches);                                                                    \
    return product(h, "cublas" #X "matinvBatched", n, n, n, batches, type, 0);                  \
  }                                                                                             \
  EMU_EXPORT int cublas##X##getrsBatched(struct handle *h, int trans, int n, int columns,       \
                                         const void *a, int lda, const int *pivots, void *b,    \
                                         int ldb, int *info, int batches) {                     \
    (void)trans, (void)a, (void)lda, (void)pivots, (void)b, (void)ldb;                          \
    set_zero(info, 1); /* of the host, one for all */                                           \
    return product(h, "cublas" #X "getrsBatched", n, columns, n, batches, type, 0);             \
  }                                                                                             \
  EMU_EXPORT int cublas##X##geqrfBatched(struct handle *h, int m, int n, void *a, int lda,      \
                                         void *tau, int *info, int batches) {                   \
    (void)a, (void)lda, (void)tau;                                                              \
    set_zero(info, 1);                                                                          \
    return product(h, "cublas" #X "geqrfBatched", m, n, n, batches, type, 0);                   \
  }                                                                                             \
  EMU_EXPORT int cublas##X##gelsBatched(struct handle *h, int trans, int m, int n, int columns, \
                                        void *a, int lda, void *c, int ldc, int *info,          \
                                        int *device_info, int batches) {                        \
    (void)trans, (void)columns, (void)a, (void)lda, (void)c, (void)ldc;                         \
    set_zero(info, 1);                                                                          \
    set_zero(device_info, batches);                                                             \
    return product(h, "cublas" #X "gelsBatched", m, n, n, batches, type, 0);                    \
  }

FACTORIZATIONS(S, R_32F)
FACTORIZATIONS(D, R_64F)
FACTORIZATIONS(C, C_32F)
FACTORIZATIONS(Z, C_64F)

#endif
