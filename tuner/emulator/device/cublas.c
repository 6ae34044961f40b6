/* cuBLAS: handles with the settings they were given, and products that are noted and not computed.
 *
 * Signatures and values of enumerations are those of cublas_api.h, CUDA 12.0 to 13.1, which do not
 * differ for what stands here. A product is noted as a launch named after its function, with the
 * grid (m, n, k) and the block (batches, type of A, type of the computation), so that it can be
 * priced. Floating-point results are left as they are, with one exception: a scalar that a program
 * reads (a norm, a dot product) is set to 1, which is finite and can be divided by.
 *
 * cuBLAS has device memory of its own for each handle; its size is not published and it is not
 * counted here. The workspace that PyTorch hands over is PyTorch's own allocation.
 */
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "versions.h"

enum {
  SUCCESS = 0,
  NOT_INITIALIZED = 1,
  ALLOC_FAILED = 3,
  INVALID_VALUE = 7,
  NOT_SUPPORTED = 15
};

/* cudaDataType_t, library_types.h */
enum { R_32F = 0, R_64F = 1, R_16F = 2, C_32F = 4, C_64F = 5 };
/* cublasComputeType_t */
enum { COMPUTE_16F = 64, COMPUTE_32F = 68, COMPUTE_64F = 70 };

struct handle {
  void *stream;
  void *workspace;
  size_t workspace_bytes;
  int pointer_mode;
  int math_mode;
  int atomics_mode;
  int multiprocessors_target;
  int emulation_strategy;
};

EMU_EXPORT int cublasCreate_v2(struct handle **handle) {
  if (!handle) return INVALID_VALUE;
  if (emu_current_physical() < 0) return NOT_INITIALIZED;
  emu_touch(emu_current_physical());
  *handle = calloc(1, sizeof **handle);
  return *handle ? SUCCESS : ALLOC_FAILED;
}

EMU_EXPORT int cublasDestroy_v2(struct handle *handle) {
  free(handle);
  return SUCCESS;
}

/* -- settings: what is set is what is read ------------------------------------------------------ */

#define SETTING(setter, getter, type, field)          \
  EMU_EXPORT int setter(struct handle *h, type value) { \
    if (!h) return NOT_INITIALIZED;                   \
    h->field = value;                                 \
    return SUCCESS;                                   \
  }                                                   \
  EMU_EXPORT int getter(struct handle *h, type *value) { \
    if (!h) return NOT_INITIALIZED;                   \
    if (!value) return INVALID_VALUE;                 \
    *value = h->field;                                \
    return SUCCESS;                                   \
  }

SETTING(cublasSetPointerMode_v2, cublasGetPointerMode_v2, int, pointer_mode)
SETTING(cublasSetMathMode, cublasGetMathMode, int, math_mode)
SETTING(cublasSetAtomicsMode, cublasGetAtomicsMode, int, atomics_mode)
SETTING(cublasSetSmCountTarget, cublasGetSmCountTarget, int, multiprocessors_target)
SETTING(cublasSetEmulationStrategy, cublasGetEmulationStrategy, int, emulation_strategy)

EMU_EXPORT int cublasSetStream_v2(struct handle *h, void *stream) {
  if (!h) return NOT_INITIALIZED;
  h->stream = stream;
  h->workspace = NULL; /* as the library does: the stream's own workspace again */
  h->workspace_bytes = 0;
  return SUCCESS;
}

EMU_EXPORT int cublasGetStream_v2(struct handle *h, void **stream) {
  if (!h) return NOT_INITIALIZED;
  *stream = h->stream;
  return SUCCESS;
}

EMU_EXPORT int cublasSetWorkspace_v2(struct handle *h, void *workspace, size_t bytes) {
  if (!h) return NOT_INITIALIZED;
  h->workspace = workspace;
  h->workspace_bytes = bytes;
  return SUCCESS;
}

/* -- versions and messages ---------------------------------------------------------------------- */

EMU_EXPORT int cublasGetVersion_v2(struct handle *h, int *version) {
  (void)h;
  *version = EMU_CUBLAS_VERSION;
  return SUCCESS;
}

EMU_EXPORT int cublasGetProperty(int which, int *value) {
  const int parts[] = {EMU_CUBLAS_VERSION / 10000, EMU_CUBLAS_VERSION / 100 % 100,
                       EMU_CUBLAS_VERSION % 100};
  if (which < 0 || which > 2 || !value) return INVALID_VALUE;
  *value = parts[which];
  return SUCCESS;
}

EMU_EXPORT size_t cublasGetCudartVersion(void) { return EMU_CUDA_VERSION; }

EMU_EXPORT const char *cublasGetStatusName(int status) {
  switch (status) {
    case SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
    case INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case 8: return "CUBLAS_STATUS_ARCH_MISMATCH";
    case 11: return "CUBLAS_STATUS_MAPPING_ERROR";
    case 13: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case 14: return "CUBLAS_STATUS_INTERNAL_ERROR";
    case NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    case 16: return "CUBLAS_STATUS_LICENSE_ERROR";
    default: return "CUBLAS_STATUS_UNKNOWN";
  }
}

EMU_EXPORT const char *cublasGetStatusString(int status) { return cublasGetStatusName(status); }

EMU_EXPORT int cublasLoggerConfigure(int on, int to_stdout, int to_stderr, const char *file) {
  (void)on, (void)to_stdout, (void)to_stderr, (void)file;
  return SUCCESS;
}

/* -- products ----------------------------------------------------------------------------------- */

static int product(struct handle *h, const char *name, int64_t m, int64_t n, int64_t k,
                   int64_t batches, int type, int compute) {
  if (!h) return NOT_INITIALIZED;
  if (m < 0 || n < 0 || k < 0 || batches < 0) return INVALID_VALUE;
  if (m && n && batches)
    emu_note_launch(name, (unsigned)m, (unsigned)n, (unsigned)k, (unsigned)batches,
                    (unsigned)type, (unsigned)compute);
  return SUCCESS;
}

/* Each of these exists for 32 bit sizes and, with the suffix _64, for 64 bit ones. */
#define GEMM(name, I, type, compute)                                                            \
  EMU_EXPORT int name(struct handle *h, int ta, int tb, I m, I n, I k, const void *alpha,       \
                      const void *a, I lda, const void *b, I ldb, const void *beta, void *c,    \
                      I ldc) {                                                                  \
    (void)ta, (void)tb, (void)alpha, (void)a, (void)lda, (void)b, (void)ldb, (void)beta;        \
    (void)c, (void)ldc;                                                                         \
    return product(h, #name, m, n, k, 1, type, compute);                                        \
  }
#define GEMM_STRIDED(name, I, type, compute)                                                    \
  EMU_EXPORT int name(struct handle *h, int ta, int tb, I m, I n, I k, const void *alpha,       \
                      const void *a, I lda, long long sa, const void *b, I ldb, long long sb,   \
                      const void *beta, void *c, I ldc, long long sc, I batches) {              \
    (void)ta, (void)tb, (void)alpha, (void)a, (void)lda, (void)sa, (void)b, (void)ldb;          \
    (void)sb, (void)beta, (void)c, (void)ldc, (void)sc;                                         \
    return product(h, #name, m, n, k, batches, type, compute);                                  \
  }
#define GEMM_BATCHED(name, I, type, compute)                                                    \
  EMU_EXPORT int name(struct handle *h, int ta, int tb, I m, I n, I k, const void *alpha,       \
                      const void *a, I lda, const void *b, I ldb, const void *beta, void *c,    \
                      I ldc, I batches) {                                                       \
    (void)ta, (void)tb, (void)alpha, (void)a, (void)lda, (void)b, (void)ldb, (void)beta;        \
    (void)c, (void)ldc;                                                                         \
    return product(h, #name, m, n, k, batches, type, compute);                                  \
  }
#define GEMM_EX_TYPED(name, I, compute) /* SgemmEx, CgemmEx */                                  \
  EMU_EXPORT int name(struct handle *h, int ta, int tb, I m, I n, I k, const void *alpha,       \
                      const void *a, int atype, I lda, const void *b, int btype, I ldb,         \
                      const void *beta, void *c, int ctype, I ldc) {                            \
    (void)ta, (void)tb, (void)alpha, (void)a, (void)lda, (void)b, (void)btype, (void)ldb;       \
    (void)beta, (void)c, (void)ctype, (void)ldc;                                                \
    return product(h, #name, m, n, k, 1, atype, compute);                                       \
  }
#define GEMM_EX(name, I)                                                                        \
  EMU_EXPORT int name(struct handle *h, int ta, int tb, I m, I n, I k, const void *alpha,       \
                      const void *a, int atype, I lda, const void *b, int btype, I ldb,         \
                      const void *beta, void *c, int ctype, I ldc, int compute, int algorithm) { \
    (void)ta, (void)tb, (void)alpha, (void)a, (void)lda, (void)b, (void)btype, (void)ldb;       \
    (void)beta, (void)c, (void)ctype, (void)ldc, (void)algorithm;                               \
    return product(h, #name, m, n, k, 1, atype, compute);                                       \
  }
#define GEMM_BATCHED_EX(name, I)                                                                \
  EMU_EXPORT int name(struct handle *h, int ta, int tb, I m, I n, I k, const void *alpha,       \
                      const void *a, int atype, I lda, const void *b, int btype, I ldb,         \
                      const void *beta, void *c, int ctype, I ldc, I batches, int compute,      \
                      int algorithm) {                                                          \
    (void)ta, (void)tb, (void)alpha, (void)a, (void)lda, (void)b, (void)btype, (void)ldb;       \
    (void)beta, (void)c, (void)ctype, (void)ldc, (void)algorithm;                               \
    return product(h, #name, m, n, k, batches, atype, compute);                                 \
  }
#define GEMM_STRIDED_EX(name, I)                                                                \
  EMU_EXPORT int name(struct handle *h, int ta, int tb, I m, I n, I k, const void *alpha,       \
                      const void *a, int atype, I lda, long long sa, const void *b, int btype,  \
                      I ldb, long long sb, const void *beta, void *c, int ctype, I ldc,         \
                      long long sc, I batches, int compute, int algorithm) {                    \
    (void)ta, (void)tb, (void)alpha, (void)a, (void)lda, (void)sa, (void)b, (void)btype;        \
    (void)ldb, (void)sb, (void)beta, (void)c, (void)ctype, (void)ldc, (void)sc;                 \
    (void)algorithm;                                                                            \
    return product(h, #name, m, n, k, batches, atype, compute);                                 \
  }
/* Groups of products, each with its own sizes; the sizes are arrays of the host. */
#define GEMM_GROUPED(name, I, type, compute)                                                    \
  EMU_EXPORT int name(struct handle *h, const int *ta, const int *tb, const I *m, const I *n,   \
                      const I *k, const void *alpha, const void *a, const I *lda,               \
                      const void *b, const I *ldb, const void *beta, void *c, const I *ldc,     \
                      I groups, const I *group_size) {                                          \
    (void)ta, (void)tb, (void)alpha, (void)a, (void)lda, (void)b, (void)ldb, (void)beta;        \
    (void)c, (void)ldc;                                                                         \
    int status = h ? SUCCESS : NOT_INITIALIZED;                                                 \
    for (I i = 0; i < groups && status == SUCCESS; i++)                                         \
      status = product(h, #name, m[i], n[i], k[i], group_size[i], type, compute);               \
    return status;                                                                              \
  }
#define GEMM_GROUPED_EX(name, I)                                                                \
  EMU_EXPORT int name(struct handle *h, const int *ta, const int *tb, const I *m, const I *n,   \
                      const I *k, const void *alpha, const void *a, int atype, const I *lda,    \
                      const void *b, int btype, const I *ldb, const void *beta, void *c,        \
                      int ctype, const I *ldc, I groups, const I *group_size, int compute) {    \
    (void)ta, (void)tb, (void)alpha, (void)a, (void)lda, (void)b, (void)btype, (void)ldb;       \
    (void)beta, (void)c, (void)ctype, (void)ldc;                                                \
    int status = h ? SUCCESS : NOT_INITIALIZED;                                                 \
    for (I i = 0; i < groups && status == SUCCESS; i++)                                         \
      status = product(h, #name, m[i], n[i], k[i], group_size[i], atype, compute);              \
    return status;                                                                              \
  }

#define GEMM_FAMILY(X, plain, type, compute)                              \
  GEMM(cublas##X##gemm##plain, int, type, compute)                        \
  GEMM(cublas##X##gemm##plain##_64, int64_t, type, compute)               \
  GEMM_STRIDED(cublas##X##gemmStridedBatched, int, type, compute)         \
  GEMM_STRIDED(cublas##X##gemmStridedBatched_64, int64_t, type, compute)  \
  GEMM_BATCHED(cublas##X##gemmBatched, int, type, compute)                \
  GEMM_BATCHED(cublas##X##gemmBatched_64, int64_t, type, compute)

GEMM_FAMILY(S, _v2, R_32F, COMPUTE_32F)
GEMM_FAMILY(D, _v2, R_64F, COMPUTE_64F)
GEMM_FAMILY(C, _v2, C_32F, COMPUTE_32F)
GEMM_FAMILY(Z, _v2, C_64F, COMPUTE_64F)
GEMM_FAMILY(H, , R_16F, COMPUTE_16F)

#define BOTH(KIND, name) KIND(name, int) KIND(name##_64, int64_t)
BOTH(GEMM_EX, cublasGemmEx)
BOTH(GEMM_BATCHED_EX, cublasGemmBatchedEx)
BOTH(GEMM_STRIDED_EX, cublasGemmStridedBatchedEx)
BOTH(GEMM_GROUPED_EX, cublasGemmGroupedBatchedEx)
GEMM_EX_TYPED(cublasSgemmEx, int, COMPUTE_32F)
GEMM_EX_TYPED(cublasSgemmEx_64, int64_t, COMPUTE_32F)
GEMM_EX_TYPED(cublasCgemmEx, int, COMPUTE_32F)
GEMM_EX_TYPED(cublasCgemmEx_64, int64_t, COMPUTE_32F)
GEMM_GROUPED(cublasSgemmGroupedBatched, int, R_32F, COMPUTE_32F)
GEMM_GROUPED(cublasSgemmGroupedBatched_64, int64_t, R_32F, COMPUTE_32F)
GEMM_GROUPED(cublasDgemmGroupedBatched, int, R_64F, COMPUTE_64F)
GEMM_GROUPED(cublasDgemmGroupedBatched_64, int64_t, R_64F, COMPUTE_64F)

#include "cublas_vectors.h"
