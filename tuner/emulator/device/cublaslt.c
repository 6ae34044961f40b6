/* cuBLASLt: descriptors whose attributes can be read back, one algorithm, products that are noted.
 *
 * Attribute numbers and sizes, and the structures below, are those of cublasLt.h, CUDA 12.0 to
 * 13.1; a number has kept its meaning over these versions. Programs may hold a descriptor in
 * memory of their own (the functions *Init_internal), so a descriptor here is no larger than the
 * opaque structures of that header: 64 bytes, 256 for the description of a product.
 */
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "versions.h"

enum { SUCCESS = 0, NOT_INITIALIZED = 1, ALLOC_FAILED = 3, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { R_8F_E4M3 = 28, R_8F_E5M2 = 29, R_8F_UE8M0 = 30, R_4F_E2M1 = 33 }; /* cudaDataType_t */

/* An attribute: its number, where it lies in the descriptor, and its size. */
struct field {
  int attribute;
  uint16_t offset;
  uint16_t bytes;
};

struct layout { /* cublasLtMatrixLayoutOpaque_t */
  uint64_t rows, columns;
  int64_t leading, batch_stride, plane_offset;
  int32_t type, order, batches, batch_mode;
};
_Static_assert(sizeof(struct layout) <= 64, "larger than cublasLtMatrixLayoutOpaque_t");

struct description { /* cublasLtMatmulDescOpaque_t */
  int64_t wide[17];
  int32_t narrow[20];
};
_Static_assert(sizeof(struct description) <= 256, "larger than cublasLtMatmulDescOpaque_t");

struct preference { /* cublasLtMatmulPreferenceOpaque_t */
  uint64_t workspace_bytes, implementations;
  uint32_t search_mode, reductions, alignment[4];
  float waves;
};
_Static_assert(sizeof(struct preference) <= 64, "larger than cublasLtMatmulPreferenceOpaque_t");

struct transform { /* cublasLtMatrixTransformDescOpaque_t */
  int32_t scale_type, pointer_mode, transa, transb;
};

struct emulation { /* cublasLtEmulationDescOpaque_t */
  void *bit_count;
  int32_t values[5];
};

#define AT(s, f) offsetof(struct s, f), sizeof(((struct s *)0)->f)
#define END {-1, 0, 0}

static const struct field layout_fields[] = {
    {0, AT(layout, type)},    {1, AT(layout, order)},        {2, AT(layout, rows)},
    {3, AT(layout, columns)}, {4, AT(layout, leading)},      {5, AT(layout, batches)},
    {6, AT(layout, batch_stride)}, {7, AT(layout, plane_offset)}, {8, AT(layout, batch_mode)},
    END};
static const struct field description_fields[] = {
    {0, AT(description, narrow[0])},   {1, AT(description, narrow[1])},
    {2, AT(description, narrow[2])},   {3, AT(description, narrow[3])},
    {4, AT(description, narrow[4])},   {5, AT(description, narrow[5])},
    {6, AT(description, narrow[6])},   {7, AT(description, narrow[7])},
    {8, AT(description, wide[0])},     {10, AT(description, wide[1])},
    {11, AT(description, wide[2])},    {12, AT(description, wide[3])},
    {13, AT(description, wide[4])},    {14, AT(description, wide[5])},
    {15, AT(description, narrow[8])},  {17, AT(description, wide[6])},
    {18, AT(description, wide[7])},    {19, AT(description, wide[8])},
    {20, AT(description, wide[9])},    {21, AT(description, wide[10])},
    {22, AT(description, narrow[9])},  {23, AT(description, wide[11])},
    {24, AT(description, wide[12])},   {25, offsetof(struct description, narrow[10]), 1},
    {26, AT(description, narrow[11])}, {27, AT(description, narrow[12])},
    {28, AT(description, narrow[13])}, {29, AT(description, wide[13])},
    {30, AT(description, wide[14])},   {31, AT(description, narrow[14])},
    {32, AT(description, narrow[15])}, {33, AT(description, narrow[16])},
    {34, AT(description, narrow[17])}, {35, AT(description, narrow[18])},
    {36, AT(description, wide[15])},   {37, AT(description, narrow[19])},
    {38, AT(description, wide[16])},   END};
static const struct field preference_fields[] = {
    {0, AT(preference, search_mode)},  {1, AT(preference, workspace_bytes)},
    {3, AT(preference, reductions)},   {5, AT(preference, alignment[0])},
    {6, AT(preference, alignment[1])}, {7, AT(preference, alignment[2])},
    {8, AT(preference, alignment[3])}, {9, AT(preference, waves)},
    {12, AT(preference, implementations)}, END};
static const struct field transform_fields[] = {
    {0, AT(transform, scale_type)}, {1, AT(transform, pointer_mode)},
    {2, AT(transform, transa)},     {3, AT(transform, transb)}, END};
static const struct field emulation_fields[] = {
    {0, AT(emulation, values[0])}, {1, AT(emulation, values[1])}, {2, AT(emulation, values[2])},
    {3, AT(emulation, values[3])}, {4, AT(emulation, values[4])}, {5, AT(emulation, bit_count)},
    END};

static const struct field *find(const struct field *fields, int attribute) {
  while (fields->attribute >= 0 && fields->attribute != attribute) fields++;
  return fields->attribute < 0 ? NULL : fields;
}

static int set(const struct field *fields, void *at, int attribute, const void *value,
               size_t bytes) {
  const struct field *field = find(fields, attribute);
  if (!at || !field || !value || bytes != field->bytes) return INVALID_VALUE;
  memcpy((char *)at + field->offset, value, bytes);
  return SUCCESS;
}

static int get(const struct field *fields, const void *at, int attribute, void *value,
               size_t bytes, size_t *written) {
  const struct field *field = find(fields, attribute);
  if (!at || !field || (bytes && !value)) return INVALID_VALUE;
  if (written) *written = field->bytes;
  if (!bytes) return written ? SUCCESS : INVALID_VALUE; /* only its size is asked for */
  if (bytes != field->bytes) return INVALID_VALUE;
  memcpy(value, (const char *)at + field->offset, bytes);
  return SUCCESS;
}

#define ATTRIBUTES(Name, fields)                                                                \
  EMU_EXPORT int cublasLt##Name##SetAttribute(void *at, int attribute, const void *value,       \
                                              size_t bytes) {                                   \
    return set(fields, at, attribute, value, bytes);                                            \
  }                                                                                             \
  EMU_EXPORT int cublasLt##Name##GetAttribute(const void *at, int attribute, void *value,       \
                                              size_t bytes, size_t *written) {                  \
    return get(fields, at, attribute, value, bytes, written);                                   \
  }                                                                                             \
  EMU_EXPORT int cublasLt##Name##Destroy(void *at) {                                            \
    free(at);                                                                                   \
    return SUCCESS;                                                                             \
  }

ATTRIBUTES(MatrixLayout, layout_fields)
ATTRIBUTES(MatmulDesc, description_fields)
ATTRIBUTES(MatmulPreference, preference_fields)
ATTRIBUTES(MatrixTransformDesc, transform_fields)
ATTRIBUTES(EmulationDesc, emulation_fields)

/* -- making descriptors, with the defaults of the header ---------------------------------------- */

EMU_EXPORT int cublasLtMatrixLayoutInit_internal(struct layout *at, size_t bytes, int type,
                                                 uint64_t rows, uint64_t columns,
                                                 int64_t leading) {
  if (!at || bytes < sizeof *at) return INVALID_VALUE;
  *at = (struct layout){.type = type, .rows = rows, .columns = columns, .leading = leading,
                        .batches = 1};
  return SUCCESS;
}

EMU_EXPORT int cublasLtMatmulDescInit_internal(struct description *at, size_t bytes, int compute,
                                               int scale_type) {
  if (!at || bytes < sizeof *at) return INVALID_VALUE;
  memset(at, 0, sizeof *at);
  at->narrow[0] = compute;
  at->narrow[1] = scale_type;
  at->narrow[6] = 2;   /* CUBLAS_FILL_MODE_FULL */
  at->narrow[7] = 1;   /* CUBLASLT_EPILOGUE_DEFAULT */
  at->narrow[9] = -1;  /* the auxiliary output has the type of the result */
  at->narrow[11] = -1; /* and so has the bias */
  return SUCCESS;
}

EMU_EXPORT int cublasLtMatmulPreferenceInit_internal(struct preference *at, size_t bytes) {
  if (!at || bytes < sizeof *at) return INVALID_VALUE;
  *at = (struct preference){.implementations = UINT64_MAX, .reductions = 7,
                            .alignment = {256, 256, 256, 256}};
  return SUCCESS;
}

EMU_EXPORT int cublasLtMatrixTransformDescInit_internal(struct transform *at, size_t bytes,
                                                        int scale_type) {
  if (!at || bytes < sizeof *at) return INVALID_VALUE;
  *at = (struct transform){.scale_type = scale_type};
  return SUCCESS;
}

EMU_EXPORT int cublasLtEmulationDescInit_internal(struct emulation *at, size_t bytes) {
  if (!at || bytes < sizeof *at) return INVALID_VALUE;
  memset(at, 0, sizeof *at);
  return SUCCESS;
}

static int made(void **out, size_t bytes) {
  if (!out) return INVALID_VALUE;
  *out = calloc(1, bytes);
  return *out ? SUCCESS : ALLOC_FAILED;
}

EMU_EXPORT int cublasLtMatrixLayoutCreate(void **out, int type, uint64_t rows, uint64_t columns,
                                          int64_t leading) {
  int status = made(out, sizeof(struct layout));
  if (status) return status;
  return cublasLtMatrixLayoutInit_internal(*out, sizeof(struct layout), type, rows, columns,
                                           leading);
}

EMU_EXPORT int cublasLtMatmulDescCreate(void **out, int compute, int scale_type) {
  int status = made(out, sizeof(struct description));
  if (status) return status;
  return cublasLtMatmulDescInit_internal(*out, sizeof(struct description), compute, scale_type);
}

EMU_EXPORT int cublasLtMatmulPreferenceCreate(void **out) {
  int status = made(out, sizeof(struct preference));
  return status ? status
                : cublasLtMatmulPreferenceInit_internal(*out, sizeof(struct preference));
}

EMU_EXPORT int cublasLtMatrixTransformDescCreate(void **out, int scale_type) {
  int status = made(out, sizeof(struct transform));
  if (status) return status;
  return cublasLtMatrixTransformDescInit_internal(*out, sizeof(struct transform), scale_type);
}

EMU_EXPORT int cublasLtEmulationDescCreate(void **out) { return made(out, sizeof(struct emulation)); }

/* -- the library -------------------------------------------------------------------------------- */

EMU_EXPORT int cublasLtCreate(void **handle) {
  if (emu_current_physical() < 0) return NOT_INITIALIZED;
  emu_touch(emu_current_physical());
  return made(handle, 64);
}

EMU_EXPORT int cublasLtDestroy(void *handle) {
  free(handle);
  return SUCCESS;
}

EMU_EXPORT size_t cublasLtGetVersion(void) { return EMU_CUBLAS_VERSION; }
EMU_EXPORT size_t cublasLtGetCudartVersion(void) { return EMU_CUDA_VERSION; }

EMU_EXPORT int cublasLtGetProperty(int which, int *value) {
  const int parts[] = {EMU_CUBLAS_VERSION / 10000, EMU_CUBLAS_VERSION / 100 % 100,
                       EMU_CUBLAS_VERSION % 100};
  if (which < 0 || which > 2 || !value) return INVALID_VALUE;
  *value = parts[which];
  return SUCCESS;
}

EMU_EXPORT const char *cublasLtGetStatusName(int status) {
  switch (status) {
    case SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
    case INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    default: return "CUBLAS_STATUS_UNKNOWN";
  }
}

EMU_EXPORT const char *cublasLtGetStatusString(int status) { return cublasLtGetStatusName(status); }

static size_t heuristics_capacity = 8192; /* programs set it; nothing is cached here */

EMU_EXPORT int cublasLtHeuristicsCacheGetCapacity(size_t *capacity) {
  *capacity = heuristics_capacity;
  return SUCCESS;
}

EMU_EXPORT int cublasLtHeuristicsCacheSetCapacity(size_t capacity) {
  heuristics_capacity = capacity;
  return SUCCESS;
}

#include "cublaslt_matmul.h"
