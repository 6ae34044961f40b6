/* The products of cuBLASLt (part of cublaslt.c). */
#ifndef TUNER_CUBLASLT_MATMUL_H
#define TUNER_CUBLASLT_MATMUL_H

struct algorithm { /* cublasLtMatmulAlgo_t */
  uint64_t data[8];
};

struct heuristic { /* cublasLtMatmulHeuristicResult_t */
  struct algorithm algorithm;
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

static int is_8_bits(int type) {
  return type == R_8F_E4M3 || type == R_8F_E5M2 || type == R_8F_UE8M0;
}

/* Types that the tensor cores of the GPU type have: 8 bit floats from capability 8.9 on, 4 bit
 * ones from 10.0 on (the tables of types in the documentation of cublasLtMatmul). */
static int has_types(const struct layout *a, const struct layout *b) {
  const struct emu_config *gpu = emu_config();
  int capability = gpu->capability_major * 10 + gpu->capability_minor;
  if ((is_8_bits(a->type) || is_8_bits(b->type)) && capability < 89) return 0;
  if ((a->type == R_4F_E2M1 || b->type == R_4F_E2M1) && capability < 100) return 0;
  return 1;
}

static int check(const struct description *d, const struct layout *a, const struct layout *b,
                 const struct layout *result) {
  if (!d || !a || !b || !result) return INVALID_VALUE;
  return has_types(a, b) ? SUCCESS : NOT_SUPPORTED;
}

/* The one algorithm needs no workspace, which is within any preference. How large the workspace of
 * a product is makes no difference to memory: PyTorch allocates what it allows. */
static void fill(struct heuristic *result, int status) {
  memset(result, 0, sizeof *result);
  result->algorithm.data[0] = 1;
  result->status = status;
  result->waves = 1.0f;
}

EMU_EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, const struct description *d,
                                              const struct layout *a, const struct layout *b,
                                              const struct layout *c, const struct layout *result,
                                              const struct preference *preference, int requested,
                                              struct heuristic results[], int *count) {
  (void)handle, (void)c, (void)preference;
  if (!count || !results || requested <= 0) return INVALID_VALUE;
  *count = 0;
  int status = check(d, a, b, result);
  if (status) return status;
  fill(&results[0], SUCCESS);
  *count = 1;
  return SUCCESS;
}

EMU_EXPORT int cublasLtMatmulAlgoGetIds(void *handle, int compute, int scale, int atype, int btype,
                                        int ctype, int dtype, int requested, int ids[],
                                        int *count) {
  (void)handle, (void)compute, (void)scale, (void)atype, (void)btype, (void)ctype, (void)dtype;
  if (!count || !ids || requested <= 0) return INVALID_VALUE;
  ids[0] = 1;
  *count = 1;
  return SUCCESS;
}

EMU_EXPORT int cublasLtMatmulAlgoInit(void *handle, int compute, int scale, int atype, int btype,
                                      int ctype, int dtype, int id, struct algorithm *algorithm) {
  (void)handle, (void)compute, (void)scale, (void)atype, (void)btype, (void)ctype, (void)dtype;
  if (!algorithm || id != 1) return INVALID_VALUE;
  *algorithm = (struct algorithm){{1}};
  return SUCCESS;
}

EMU_EXPORT int cublasLtMatmulAlgoCheck(void *handle, const struct description *d,
                                       const struct layout *a, const struct layout *b,
                                       const struct layout *c, const struct layout *result,
                                       const struct algorithm *algorithm, struct heuristic *out) {
  (void)handle, (void)c;
  if (!algorithm || !out) return INVALID_VALUE;
  int status = check(d, a, b, result);
  fill(out, status);
  return status;
}

/* The configuration of the algorithm: each number is one of the nine 32 bit values that the
 * structure keeps behind its identity (CUBLASLT_ALGO_CONFIG_*; two of them are 16 bit). */
EMU_EXPORT int cublasLtMatmulAlgoConfigSetAttribute(struct algorithm *algorithm, int attribute,
                                                    const void *value, size_t bytes) {
  if (!algorithm || !value || attribute < 0 || attribute > 8 || bytes > 4) return INVALID_VALUE;
  if (attribute == 0) return INVALID_VALUE; /* the identity is read only */
  memcpy((char *)&algorithm->data[1] + 4 * attribute, value, bytes);
  return SUCCESS;
}

EMU_EXPORT int cublasLtMatmulAlgoConfigGetAttribute(const struct algorithm *algorithm,
                                                    int attribute, void *value, size_t bytes,
                                                    size_t *written) {
  if (!algorithm || attribute < 0 || attribute > 8 || bytes > 4) return INVALID_VALUE;
  if (written) *written = attribute >= 7 ? 2 : 4;
  if (!bytes) return written ? SUCCESS : INVALID_VALUE;
  if (!value) return INVALID_VALUE;
  if (attribute == 0)
    memcpy(value, algorithm->data, bytes);
  else
    memcpy(value, (const char *)&algorithm->data[1] + 4 * attribute, bytes);
  return SUCCESS;
}

EMU_EXPORT int cublasLtMatmulAlgoCapGetAttribute(const struct algorithm *algorithm, int attribute,
                                                 void *value, size_t bytes, size_t *written) {
  (void)attribute;
  if (!algorithm || (bytes && !value)) return INVALID_VALUE;
  if (value) memset(value, 0, bytes); /* no variants: one tile, one stage, no split */
  if (written) *written = bytes ? bytes : 4;
  return SUCCESS;
}

/* m and n are the result's; k is the side of A that is not m, by the transposition of A. */
EMU_EXPORT int cublasLtMatmul(void *handle, const struct description *d, const void *alpha,
                              const void *A, const struct layout *a, const void *B,
                              const struct layout *b, const void *beta, const void *C,
                              const struct layout *c, void *D, const struct layout *result,
                              const struct algorithm *algorithm, void *workspace,
                              size_t workspace_bytes, void *stream) {
  (void)handle, (void)alpha, (void)A, (void)B, (void)beta, (void)C, (void)c, (void)D;
  (void)algorithm, (void)workspace, (void)workspace_bytes, (void)stream;
  int status = check(d, a, b, result);
  if (status) return status;
  uint64_t k = d->narrow[3] ? a->rows : a->columns;
  if (result->rows && result->columns && result->batches)
    emu_note_launch("cublasLtMatmul", (unsigned)result->rows, (unsigned)result->columns,
                    (unsigned)k, (unsigned)result->batches, (unsigned)a->type,
                    (unsigned)d->narrow[0]);
  return SUCCESS;
}

EMU_EXPORT int cublasLtMatrixTransform(void *handle, const struct transform *d, const void *alpha,
                                       const void *A, const struct layout *a, const void *beta,
                                       const void *B, const struct layout *b, void *C,
                                       const struct layout *c, void *stream) {
  (void)handle, (void)alpha, (void)A, (void)a, (void)beta, (void)B, (void)b, (void)C, (void)stream;
  if (!d || !c) return INVALID_VALUE;
  emu_note_launch("cublasLtMatrixTransform", (unsigned)c->rows, (unsigned)c->columns, 1,
                  (unsigned)c->batches, (unsigned)c->type, 0);
  return SUCCESS;
}

#endif
