/* cuSOLVER (dense): factorizations that programs take of weights and gradients, such as the
 * singular vectors of GaLore or the inverse roots of Shampoo. Nothing is computed: error codes are 0,
 * pivots leave rows as they are, and floating-point results stay as they were.
 *
 * Signatures are those of cusolverDn.h, CUDA 12.0 to 13.0. The sizes of workspaces are not published;
 * assumed is one more copy of the matrix (of each matrix of a batch), on the device. What PyTorch does
 * not link stays counted as unknown (build.py).
 */
#include <stdlib.h>
#include <string.h>

#include "device.h"

enum { SUCCESS = 0, NOT_INITIALIZED = 1, ALLOC_FAILED = 2, INVALID_VALUE = 3 };

struct handle {
  void *stream;
  int deterministic;
};

static int made(void **out) {
  if (!out) return INVALID_VALUE;
  *out = calloc(1, sizeof(struct handle));
  return *out ? SUCCESS : ALLOC_FAILED;
}

static int freed(void *p) {
  free(p);
  return SUCCESS;
}

EMU_EXPORT int cusolverDnCreate(void **out) {
  if (emu_current_physical() < 0) return NOT_INITIALIZED;
  emu_touch(emu_current_physical());
  return made(out);
}

EMU_EXPORT int cusolverDnDestroy(void *h) { return freed(h); }
EMU_EXPORT int cusolverDnCreateParams(void **out) { return made(out); }
EMU_EXPORT int cusolverDnDestroyParams(void *p) { return freed(p); }
EMU_EXPORT int cusolverDnCreateGesvdjInfo(void **out) { return made(out); }
EMU_EXPORT int cusolverDnDestroyGesvdjInfo(void *p) { return freed(p); }
EMU_EXPORT int cusolverDnCreateSyevjInfo(void **out) { return made(out); }
EMU_EXPORT int cusolverDnDestroySyevjInfo(void *p) { return freed(p); }

EMU_EXPORT int cusolverDnSetStream(struct handle *h, void *stream) {
  if (!h) return NOT_INITIALIZED;
  h->stream = stream;
  return SUCCESS;
}

EMU_EXPORT int cusolverDnGetStream(const struct handle *h, void **stream) {
  if (!h || !stream) return NOT_INITIALIZED;
  *stream = h->stream;
  return SUCCESS;
}

EMU_EXPORT int cusolverDnSetDeterministicMode(struct handle *h, int mode) {
  if (!h) return NOT_INITIALIZED;
  h->deterministic = mode;
  return SUCCESS;
}

#define KEPT(name) /* accuracy and order: nothing is computed */ \
  EMU_EXPORT int name(void *p) { return p ? SUCCESS : INVALID_VALUE; }
KEPT(cusolverDnXgesvdjSetTolerance)
KEPT(cusolverDnXgesvdjSetMaxSweeps)
KEPT(cusolverDnXgesvdjSetSortEig)
KEPT(cusolverDnXsyevjSetTolerance)
KEPT(cusolverDnXsyevjSetMaxSweeps)
KEPT(cusolverDnXsyevjSetSortEig)

/* -- one job, noted ----------------------------------------------------------------------------- */

static int elements(int64_t m, int64_t n, int64_t batches, int *work) {
  int64_t size = m * n * batches;
  if (m < 0 || n < 0 || size > INT32_MAX || !work) return INVALID_VALUE;
  *work = size ? (int)size : 1;
  return SUCCESS;
}

static size_t type_bytes(int type) { /* cudaDataType_t */
  return type == 5 ? 16 : type == 4 || type == 1 ? 8 : 4;
}

static int bytes(int64_t m, int64_t n, int64_t batches, int type, size_t *device, size_t *host) {
  if (m < 0 || n < 0 || !device || !host) return INVALID_VALUE;
  *device = (size_t)(m * n * batches) * type_bytes(type);
  *host = 0;
  return SUCCESS;
}

static int done(const char *name, int64_t m, int64_t n, int64_t k, int64_t batches, int *info) {
  if (info) memset(info, 0, (size_t)batches * sizeof *info);
  emu_note_launch(name, (unsigned)m, (unsigned)n, (unsigned)k, (unsigned)batches, 1, 1);
  return SUCCESS;
}

static void keep_rows(int *pivots, int64_t count) {
  for (int64_t i = 0; pivots && i < count; i++) pivots[i] = (int)i + 1;
}

typedef const void *in;
typedef void *out;

/* -- by type ------------------------------------------------------------------------------------ */

#define N(X, rest) cusolverDn##X##rest
#define TEXT(X, rest) "cusolverDn" #X #rest

#define COMMON(X)                                                                               \
  EMU_EXPORT int N(X, getrf_bufferSize)(in h, int m, int n, in a, int lda, int *work) {         \
    (void)h, (void)a, (void)lda;                                                                \
    return elements(m, n, 1, work);                                                             \
  }                                                                                             \
  EMU_EXPORT int N(X, getrf)(in h, int m, int n, out a, int lda, out work, int *pivots,         \
                             int *info) {                                                       \
    (void)h, (void)a, (void)lda, (void)work;                                                    \
    keep_rows(pivots, m < n ? m : n);                                                           \
    return done(TEXT(X, getrf), m, n, n, 1, info);                                              \
  }                                                                                             \
  EMU_EXPORT int N(X, getrs)(in h, int t, int n, int columns, in a, int lda, const int *pivots, \
                             out b, int ldb, int *info) {                                       \
    (void)h, (void)t, (void)a, (void)lda, (void)pivots, (void)b, (void)ldb;                     \
    return done(TEXT(X, getrs), n, columns, n, 1, info);                                        \
  }                                                                                             \
  EMU_EXPORT int N(X, potrf_bufferSize)(in h, int uplo, int n, in a, int lda, int *work) {      \
    (void)h, (void)uplo, (void)a, (void)lda;                                                    \
    return elements(n, n, 1, work);                                                             \
  }                                                                                             \
  EMU_EXPORT int N(X, potrf)(in h, int uplo, int n, out a, int lda, out work, int size,         \
                             int *info) {                                                       \
    (void)h, (void)uplo, (void)a, (void)lda, (void)work, (void)size;                            \
    return done(TEXT(X, potrf), n, n, n, 1, info);                                              \
  }                                                                                             \
  EMU_EXPORT int N(X, potrs)(in h, int uplo, int n, int columns, in a, int lda, out b, int ldb, \
                             int *info) {                                                       \
    (void)h, (void)uplo, (void)a, (void)lda, (void)b, (void)ldb;                                \
    return done(TEXT(X, potrs), n, columns, n, 1, info);                                        \
  }                                                                                             \
  EMU_EXPORT int N(X, potrfBatched)(in h, int uplo, int n, out a, int lda, int *info,           \
                                    int batches) {                                              \
    (void)h, (void)uplo, (void)a, (void)lda;                                                    \
    return done(TEXT(X, potrfBatched), n, n, n, batches, info);                                 \
  }                                                                                             \
  EMU_EXPORT int N(X, potrsBatched)(in h, int uplo, int n, int columns, out a, int lda, out b,  \
                                    int ldb, int *info, int batches) {                          \
    (void)h, (void)uplo, (void)a, (void)lda, (void)b, (void)ldb, (void)batches;                 \
    return done(TEXT(X, potrsBatched), n, columns, n, 1, info);                                 \
  }                                                                                             \
  EMU_EXPORT int N(X, geqrf_bufferSize)(in h, int m, int n, in a, int lda, int *work) {         \
    (void)h, (void)a, (void)lda;                                                                \
    return elements(m, n, 1, work);                                                             \
  }                                                                                             \
  EMU_EXPORT int N(X, geqrf)(in h, int m, int n, out a, int lda, out tau, out work, int size,   \
                             int *info) {                                                       \
    (void)h, (void)a, (void)lda, (void)tau, (void)work, (void)size;                             \
    return done(TEXT(X, geqrf), m, n, n, 1, info);                                              \
  }                                                                                             \
  EMU_EXPORT int N(X, gesvd_bufferSize)(in h, int m, int n, int *work) {                        \
    (void)h;                                                                                    \
    return elements(m, n, 1, work);                                                             \
  }                                                                                             \
  EMU_EXPORT int N(X, gesvd)(in h, signed char ju, signed char jv, int m, int n, out a, int lda, \
                             out s, out u, int ldu, out v, int ldv, out work, int size,         \
                             out real, int *info) {                                             \
    (void)h, (void)ju, (void)jv, (void)a, (void)lda, (void)s, (void)u, (void)ldu, (void)v;      \
    (void)ldv, (void)work, (void)size, (void)real;                                              \
    return done(TEXT(X, gesvd), m, n, n, 1, info);                                              \
  }                                                                                             \
  EMU_EXPORT int N(X, gesvdj_bufferSize)(in h, int job, int econ, int m, int n, in a, int lda,  \
                                         in s, in u, int ldu, in v, int ldv, int *work) {       \
    (void)h, (void)job, (void)econ, (void)a, (void)lda, (void)s, (void)u, (void)ldu, (void)v;   \
    (void)ldv;                                                                                  \
    return elements(m, n, 1, work);                                                             \
  }                                                                                             \
  EMU_EXPORT int N(X, gesvdj)(in h, int job, int econ, int m, int n, out a, int lda, out s,     \
                              out u, int ldu, out v, int ldv, out work, int size, int *info) {  \
    (void)h, (void)job, (void)econ, (void)a, (void)lda, (void)s, (void)u, (void)ldu, (void)v;   \
    (void)ldv, (void)work, (void)size;                                                          \
    return done(TEXT(X, gesvdj), m, n, n, 1, info);                                             \
  }                                                                                             \
  EMU_EXPORT int N(X, gesvdjBatched_bufferSize)(in h, int job, int m, int n, in a, int lda,     \
                                                in s, in u, int ldu, in v, int ldv, int *work,  \
                                                in parameters, int batches) {                   \
    (void)h, (void)job, (void)a, (void)lda, (void)s, (void)u, (void)ldu, (void)v, (void)ldv;    \
    (void)parameters;                                                                           \
    return elements(m, n, batches, work);                                                       \
  }                                                                                             \
  EMU_EXPORT int N(X, gesvdjBatched)(in h, int job, int m, int n, out a, int lda, out s, out u, \
                                     int ldu, out v, int ldv, out work, int size, int *info,    \
                                     in parameters, int batches) {                              \
    (void)h, (void)job, (void)a, (void)lda, (void)s, (void)u, (void)ldu, (void)v, (void)ldv;    \
    (void)work, (void)size, (void)parameters;                                                   \
    return done(TEXT(X, gesvdjBatched), m, n, n, batches, info);                                \
  }                                                                                             \
  EMU_EXPORT int N(X, gesvdaStridedBatched_bufferSize)(                                         \
      in h, int job, int rank, int m, int n, in a, int lda, long long sa, in s, long long ss,   \
      in u, int ldu, long long su, in v, int ldv, long long sv, int *work, int batches) {       \
    (void)h, (void)job, (void)rank, (void)a, (void)lda, (void)sa, (void)s, (void)ss, (void)u;   \
    (void)ldu, (void)su, (void)v, (void)ldv, (void)sv;                                          \
    return elements(m, n, batches, work);                                                       \
  }                                                                                             \
  EMU_EXPORT int N(X, gesvdaStridedBatched)(                                                    \
      in h, int job, int rank, int m, int n, in a, int lda, long long sa, out s, long long ss,  \
      out u, int ldu, long long su, out v, int ldv, long long sv, out work, int size, int *info, \
      double *residuals, int batches) {                                                         \
    (void)h, (void)job, (void)rank, (void)a, (void)lda, (void)sa, (void)s, (void)ss, (void)u;   \
    (void)ldu, (void)su, (void)v, (void)ldv, (void)sv, (void)work, (void)size;                  \
    if (residuals) memset(residuals, 0, (size_t)batches * sizeof *residuals);                   \
    return done(TEXT(X, gesvdaStridedBatched), m, n, n, batches, info);                         \
  }                                                                                             \
  EMU_EXPORT int N(X, sytrf_bufferSize)(in h, int n, in a, int lda, int *work) {                \
    (void)h, (void)a, (void)lda;                                                                \
    return elements(n, n, 1, work);                                                             \
  }                                                                                             \
  EMU_EXPORT int N(X, sytrf)(in h, int uplo, int n, out a, int lda, int *pivots, out work,      \
                             int size, int *info) {                                             \
    (void)h, (void)uplo, (void)a, (void)lda, (void)work, (void)size;                            \
    keep_rows(pivots, n);                                                                       \
    return done(TEXT(X, sytrf), n, n, n, 1, info);                                              \
  }

COMMON(S) COMMON(D) COMMON(C) COMMON(Z)

/* Real and complex types differ in the names: orgqr or ungqr, syevd or heevd. */
#define NAMED(X, gqr, mqr, evd, evj)                                                            \
  EMU_EXPORT int N(X, gqr##_bufferSize)(in h, int m, int n, int k, in a, int lda, in tau,       \
                                        int *work) {                                            \
    (void)h, (void)k, (void)a, (void)lda, (void)tau;                                            \
    return elements(m, n, 1, work);                                                             \
  }                                                                                             \
  EMU_EXPORT int N(X, gqr)(in h, int m, int n, int k, out a, int lda, in tau, out work,         \
                           int size, int *info) {                                               \
    (void)h, (void)a, (void)lda, (void)tau, (void)work, (void)size;                             \
    return done(TEXT(X, gqr), m, n, k, 1, info);                                                \
  }                                                                                             \
  EMU_EXPORT int N(X, mqr##_bufferSize)(in h, int side, int t, int m, int n, int k, in a,       \
                                        int lda, in tau, in c, int ldc, int *work) {            \
    (void)h, (void)side, (void)t, (void)k, (void)a, (void)lda, (void)tau, (void)c, (void)ldc;   \
    return elements(m, n, 1, work);                                                             \
  }                                                                                             \
  EMU_EXPORT int N(X, mqr)(in h, int side, int t, int m, int n, int k, in a, int lda, in tau,   \
                           out c, int ldc, out work, int size, int *info) {                     \
    (void)h, (void)side, (void)t, (void)a, (void)lda, (void)tau, (void)c, (void)ldc;            \
    (void)work, (void)size;                                                                     \
    return done(TEXT(X, mqr), m, n, k, 1, info);                                                \
  }                                                                                             \
  EMU_EXPORT int N(X, evd##_bufferSize)(in h, int job, int uplo, int n, in a, int lda, in w,    \
                                        int *work) {                                            \
    (void)h, (void)job, (void)uplo, (void)a, (void)lda, (void)w;                                \
    return elements(n, n, 1, work);                                                             \
  }                                                                                             \
  EMU_EXPORT int N(X, evd)(in h, int job, int uplo, int n, out a, int lda, out w, out work,     \
                           int size, int *info) {                                               \
    (void)h, (void)job, (void)uplo, (void)a, (void)lda, (void)w, (void)work, (void)size;        \
    return done(TEXT(X, evd), n, n, n, 1, info);                                                \
  }                                                                                             \
  EMU_EXPORT int N(X, evj##_bufferSize)(in h, int job, int uplo, int n, in a, int lda, in w,    \
                                        int *work) {                                            \
    (void)h, (void)job, (void)uplo, (void)a, (void)lda, (void)w;                                \
    return elements(n, n, 1, work);                                                             \
  }                                                                                             \
  EMU_EXPORT int N(X, evj)(in h, int job, int uplo, int n, out a, int lda, out w, out work,     \
                           int size, int *info) {                                               \
    (void)h, (void)job, (void)uplo, (void)a, (void)lda, (void)w, (void)work, (void)size;        \
    return done(TEXT(X, evj), n, n, n, 1, info);                                                \
  }                                                                                             \
  EMU_EXPORT int N(X, evj##Batched_bufferSize)(in h, int job, int uplo, int n, in a, int lda,   \
                                               in w, int *work, in parameters, int batches) {   \
    (void)h, (void)job, (void)uplo, (void)a, (void)lda, (void)w, (void)parameters;              \
    return elements(n, n, batches, work);                                                       \
  }                                                                                             \
  EMU_EXPORT int N(X, evj##Batched)(in h, int job, int uplo, int n, out a, int lda, out w,      \
                                    out work, int size, int *info, in parameters,               \
                                    int batches) {                                              \
    (void)h, (void)job, (void)uplo, (void)a, (void)lda, (void)w, (void)work, (void)size;        \
    (void)parameters;                                                                           \
    return done(TEXT(X, evj##Batched), n, n, n, batches, info);                                 \
  }

NAMED(S, orgqr, ormqr, syevd, syevj)
NAMED(D, orgqr, ormqr, syevd, syevj)
NAMED(C, ungqr, unmqr, heevd, heevj)
NAMED(Z, ungqr, unmqr, heevd, heevj)

#include "cusolver_generic.h"
