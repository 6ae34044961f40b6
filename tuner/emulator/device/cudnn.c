/* cuDNN 9: handles, the older API (convolutions, batch norm, recurrent layers, CTC), and by its
 * parts cudnn_backend.h (the API of graphs) and cudnn_workspace.h (how much memory is assumed).
 *
 * Signatures and numbers are those of cudnn_ops_v9.h, cudnn_cnn_v9.h and cudnn_adv_v9.h, cuDNN 9.1 to
 * 9.28. PyTorch links libcudnn.so.9 alone; the libraries that it loads by itself (libcudnn_graph,
 * libcudnn_engines_*, ...) are never asked for. Floating-point results are left as they are.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "versions.h"

enum { /* cudnnStatus_t */
  SUCCESS = 0,
  NOT_INITIALIZED = 1001,
  SERIALIZATION_MISMATCH = 1003,
  BAD_PARAM = 2000,
  BAD_PARAM_NULL = 2002,
  BAD_PARAM_TYPE = 2010,
  NOT_SUPPORTED = 3000,
  ALLOC_FAILED = 4003
};

#include "cudnn_backend.h"
#include "cudnn_recurrent.h"

/* -- handles, versions, messages ---------------------------------------------------------------- */

struct handle {
  void *stream;
};

EMU_EXPORT int cudnnCreate(struct handle **handle) {
  if (!handle) return BAD_PARAM_NULL;
  if (emu_current_physical() < 0) return NOT_INITIALIZED;
  emu_touch(emu_current_physical());
  *handle = calloc(1, sizeof **handle);
  return *handle ? SUCCESS : ALLOC_FAILED;
}

EMU_EXPORT int cudnnDestroy(struct handle *handle) {
  free(handle);
  return SUCCESS;
}

EMU_EXPORT int cudnnSetStream(struct handle *handle, void *stream) {
  if (!handle) return BAD_PARAM_NULL;
  handle->stream = stream;
  return SUCCESS;
}

EMU_EXPORT int cudnnGetStream(struct handle *handle, void **stream) {
  if (!handle || !stream) return BAD_PARAM_NULL;
  *stream = handle->stream;
  return SUCCESS;
}

EMU_EXPORT size_t cudnnGetVersion(void) { return EMU_CUDNN_VERSION; }
EMU_EXPORT size_t cudnnGetCudartVersion(void) { return EMU_CUDA_VERSION; }

EMU_EXPORT size_t cudnnGetMaxDeviceVersion(void) { /* of the device that is emulated */
  return (size_t)(emu_config()->capability_major * 100 + emu_config()->capability_minor * 10);
}

EMU_EXPORT int cudnnGetProperty(int which, int *value) {
  const int parts[] = {EMU_CUDNN_VERSION / 10000, EMU_CUDNN_VERSION / 100 % 100,
                       EMU_CUDNN_VERSION % 100};
  if (which < 0 || which > 2 || !value) return BAD_PARAM;
  *value = parts[which];
  return SUCCESS;
}

EMU_EXPORT const char *cudnnGetErrorString(int status) {
  switch (status) {
    case SUCCESS: return "CUDNN_STATUS_SUCCESS";
    case NOT_INITIALIZED: return "CUDNN_STATUS_NOT_INITIALIZED";
    case SERIALIZATION_MISMATCH: return "CUDNN_STATUS_SERIALIZATION_VERSION_MISMATCH";
    case BAD_PARAM: return "CUDNN_STATUS_BAD_PARAM";
    case BAD_PARAM_NULL: return "CUDNN_STATUS_BAD_PARAM_NULL_POINTER";
    case BAD_PARAM_TYPE: return "CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE";
    case NOT_SUPPORTED: return "CUDNN_STATUS_NOT_SUPPORTED";
    case ALLOC_FAILED: return "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED";
    default: return "CUDNN_STATUS_UNKNOWN";
  }
}

EMU_EXPORT void cudnnGetLastErrorString(char *message, size_t most) {
  if (message && most) message[0] = 0;
}

/* -- descriptors of the older API --------------------------------------------------------------- */

/* Tensors and filters are shapes; the rest is only kept. */
#define DESCRIPTOR(Name, type)                                 \
  EMU_EXPORT int cudnnCreate##Name##Descriptor(void **out) {   \
    if (!out) return BAD_PARAM_NULL;                           \
    *out = calloc(1, sizeof(type));                            \
    return *out ? SUCCESS : ALLOC_FAILED;                      \
  }                                                            \
  EMU_EXPORT int cudnnDestroy##Name##Descriptor(void *d) {     \
    free(d);                                                   \
    return SUCCESS;                                            \
  }

struct convolution_descriptor {
  int groups;
  int math_type;
};

DESCRIPTOR(Tensor, struct shape)
DESCRIPTOR(Filter, struct shape)
DESCRIPTOR(Convolution, struct convolution_descriptor)
DESCRIPTOR(Activation, int64_t)
DESCRIPTOR(Pooling, int64_t)
DESCRIPTOR(Dropout, int64_t)
DESCRIPTOR(CTCLoss, int64_t)
DESCRIPTOR(SpatialTransformer, int64_t)
DESCRIPTOR(RNN, struct recurrent)
DESCRIPTOR(RNNData, struct sequences)

EMU_EXPORT int cudnnSetTensorNdDescriptor(struct shape *d, int type, int dimensions,
                                          const int size[], const int stride[]) {
  if (!d || !size || !stride) return BAD_PARAM_NULL;
  if (dimensions < 1 || dimensions > MOST_DIMENSIONS) return BAD_PARAM;
  *d = (struct shape){.dimensions = dimensions, .type = type};
  for (int i = 0; i < dimensions; i++) d->size[i] = size[i], d->stride[i] = stride[i];
  return SUCCESS;
}

EMU_EXPORT int cudnnGetTensorNdDescriptor(const struct shape *d, int requested, int *type,
                                          int *dimensions, int size[], int stride[]) {
  if (!d || !type || !dimensions) return BAD_PARAM_NULL;
  *type = d->type;
  *dimensions = d->dimensions;
  for (int i = 0; i < requested && i < d->dimensions; i++)
    size[i] = (int)d->size[i], stride[i] = (int)d->stride[i];
  return SUCCESS;
}

/* Filters are dense; format 1 is channels last. */
EMU_EXPORT int cudnnSetFilterNdDescriptor(struct shape *d, int type, int format, int dimensions,
                                          const int size[]) {
  if (!d || !size) return BAD_PARAM_NULL;
  if (dimensions < 1 || dimensions > MOST_DIMENSIONS) return BAD_PARAM;
  *d = (struct shape){.dimensions = dimensions, .type = type};
  int64_t step = format == 1 && dimensions > 1 ? size[1] : 1;
  for (int i = dimensions - 1; i >= 0; i--) {
    d->size[i] = size[i];
    if (format == 1 && i == 1) {
      d->stride[i] = 1;
      continue;
    }
    d->stride[i] = step;
    step *= size[i];
  }
  return SUCCESS;
}

EMU_EXPORT int cudnnGetFilterNdDescriptor(const struct shape *d, int requested, int *type,
                                          int *format, int *dimensions, int size[]) {
  if (!d || !type || !format || !dimensions) return BAD_PARAM_NULL;
  *type = d->type;
  *format = d->dimensions > 1 && d->size[1] > 1 && d->stride[1] == 1;
  *dimensions = d->dimensions;
  for (int i = 0; i < requested && i < d->dimensions; i++) size[i] = (int)d->size[i];
  return SUCCESS;
}

EMU_EXPORT int cudnnSetConvolutionNdDescriptor(struct convolution_descriptor *d) {
  if (!d) return BAD_PARAM_NULL;
  d->groups = 1;
  return SUCCESS;
}

EMU_EXPORT int cudnnSetConvolutionGroupCount(struct convolution_descriptor *d, int groups) {
  if (!d || groups < 1) return BAD_PARAM;
  d->groups = groups;
  return SUCCESS;
}

EMU_EXPORT int cudnnSetConvolutionMathType(struct convolution_descriptor *d, int math_type) {
  if (!d) return BAD_PARAM_NULL;
  d->math_type = math_type;
  return SUCCESS;
}

#define KEPT(name) /* sets what nothing here asks for */ \
  EMU_EXPORT int name(void *d) { return d ? SUCCESS : BAD_PARAM_NULL; }
KEPT(cudnnSetActivationDescriptor)
KEPT(cudnnSetPooling2dDescriptor)
KEPT(cudnnSetPoolingNdDescriptor)
KEPT(cudnnSetCTCLossDescriptor)
KEPT(cudnnSetCTCLossDescriptorEx)
KEPT(cudnnSetCTCLossDescriptor_v8)
KEPT(cudnnSetCTCLossDescriptor_v9)
KEPT(cudnnSetSpatialTransformerNdDescriptor)

/* -- convolutions ------------------------------------------------------------------------------- */

struct performance { /* cudnnConvolution*AlgoPerf_t */
  int algorithm;
  int status;
  float milliseconds;
  size_t workspace_bytes;
  int deterministic;
  int math_type;
  int reserved[3];
};

/* Algorithm 1 is deterministic in all three directions (implicit precomputed product, and the first
 * algorithms of the gradients). cudnnMathType_t 3, FMA, keeps off the tensor cores. */
static size_t legacy_workspace(const struct convolution_descriptor *c, const struct shape *x,
                               const struct shape *w, const struct shape *y) {
  return (size_t)convolution_workspace(x, w, y, c->math_type != 3);
}

static int propose(const struct convolution_descriptor *c, const struct shape *x,
                   const struct shape *w, const struct shape *y, int requested, int *returned,
                   struct performance *results) {
  if (!c || !x || !w || !y || !returned || !results) return BAD_PARAM_NULL;
  if (requested < 1) return BAD_PARAM;
  results[0] = (struct performance){.algorithm = 1, .deterministic = 1, .math_type = c->math_type,
                                    .workspace_bytes = legacy_workspace(c, x, w, y)};
  *returned = 1;
  return SUCCESS;
}

typedef const struct convolution_descriptor *conv;
typedef const struct shape *shape;

EMU_EXPORT int cudnnGetConvolutionForwardWorkspaceSize(void *h, shape x, shape w, conv c, shape y,
                                                       int algorithm, size_t *bytes) {
  (void)h, (void)algorithm;
  *bytes = legacy_workspace(c, x, w, y);
  return SUCCESS;
}

EMU_EXPORT int cudnnGetConvolutionBackwardDataWorkspaceSize(void *h, shape w, shape dy, conv c,
                                                            shape dx, int algorithm,
                                                            size_t *bytes) {
  (void)h, (void)algorithm;
  *bytes = legacy_workspace(c, dx, w, dy);
  return SUCCESS;
}

EMU_EXPORT int cudnnGetConvolutionBackwardFilterWorkspaceSize(void *h, shape x, shape dy, conv c,
                                                              shape dw, int algorithm,
                                                              size_t *bytes) {
  (void)h, (void)algorithm;
  *bytes = legacy_workspace(c, x, dw, dy);
  return SUCCESS;
}

EMU_EXPORT int cudnnGetConvolutionForwardAlgorithm_v7(void *h, shape x, shape w, conv c, shape y,
                                                      int most, int *n, struct performance *out) {
  (void)h;
  return propose(c, x, w, y, most, n, out);
}

EMU_EXPORT int cudnnGetConvolutionBackwardDataAlgorithm_v7(void *h, shape w, shape dy, conv c,
                                                           shape dx, int most, int *n,
                                                           struct performance *out) {
  (void)h;
  return propose(c, dx, w, dy, most, n, out);
}

EMU_EXPORT int cudnnGetConvolutionBackwardFilterAlgorithm_v7(void *h, shape x, shape dy, conv c,
                                                             shape dw, int most, int *n,
                                                             struct performance *out) {
  (void)h;
  return propose(c, x, dw, dy, most, n, out);
}

EMU_EXPORT int cudnnFindConvolutionForwardAlgorithmEx(void *h, shape x, const void *xp, shape w,
                                                      const void *wp, conv c, shape y, void *yp,
                                                      int most, int *n, struct performance *out) {
  (void)h, (void)xp, (void)wp, (void)yp;
  return propose(c, x, w, y, most, n, out);
}

EMU_EXPORT int cudnnFindConvolutionBackwardDataAlgorithmEx(void *h, shape w, const void *wp,
                                                           shape dy, const void *dyp, conv c,
                                                           shape dx, void *dxp, int most, int *n,
                                                           struct performance *out) {
  (void)h, (void)wp, (void)dyp, (void)dxp;
  return propose(c, dx, w, dy, most, n, out);
}

EMU_EXPORT int cudnnFindConvolutionBackwardFilterAlgorithmEx(void *h, shape x, const void *xp,
                                                             shape dy, const void *dyp, conv c,
                                                             shape dw, void *dwp, int most, int *n,
                                                             struct performance *out) {
  (void)h, (void)xp, (void)dyp, (void)dwp;
  return propose(c, x, dw, dy, most, n, out);
}

EMU_EXPORT int cudnnConvolutionForward(void *h, const void *alpha, shape x, const void *xp, shape w,
                                       const void *wp, conv c, int algorithm, void *workspace,
                                       size_t bytes, const void *beta, shape y, void *yp) {
  (void)h, (void)alpha, (void)xp, (void)wp, (void)c, (void)algorithm, (void)workspace, (void)bytes;
  (void)beta, (void)yp;
  note_convolution(CONVOLVE, x, w, y);
  return SUCCESS;
}

EMU_EXPORT int cudnnConvolutionBiasActivationForward(
    void *h, const void *alpha, shape x, const void *xp, shape w, const void *wp, conv c,
    int algorithm, void *workspace, size_t bytes, const void *alpha2, const void *z, const void *zp,
    const void *bias, const void *biasp, const void *activation, shape y, void *yp) {
  (void)h, (void)alpha, (void)xp, (void)wp, (void)c, (void)algorithm, (void)workspace, (void)bytes;
  (void)alpha2, (void)z, (void)zp, (void)bias, (void)biasp, (void)activation, (void)yp;
  note_convolution(CONVOLVE, x, w, y);
  return SUCCESS;
}

EMU_EXPORT int cudnnConvolutionBackwardData(void *h, const void *alpha, shape w, const void *wp,
                                            shape dy, const void *dyp, conv c, int algorithm,
                                            void *workspace, size_t bytes, const void *beta,
                                            shape dx, void *dxp) {
  (void)h, (void)alpha, (void)wp, (void)dyp, (void)c, (void)algorithm, (void)workspace;
  (void)bytes, (void)beta, (void)dxp;
  note_convolution(GRADIENT_OF_DATA, dx, w, dy);
  return SUCCESS;
}

EMU_EXPORT int cudnnConvolutionBackwardFilter(void *h, const void *alpha, shape x, const void *xp,
                                              shape dy, const void *dyp, conv c, int algorithm,
                                              void *workspace, size_t bytes, const void *beta,
                                              shape dw, void *dwp) {
  (void)h, (void)alpha, (void)xp, (void)dyp, (void)c, (void)algorithm, (void)workspace;
  (void)bytes, (void)beta, (void)dwp;
  note_convolution(GRADIENT_OF_FILTER, x, dw, dy);
  return SUCCESS;
}

/* -- batch norm, pooling, spatial transformer, CTC ---------------------------------------------- */

/* Assumed: the plain batch norm (which is all that PyTorch asks for) needs neither workspace nor
 * reserve; with an activation it would keep a bit for each element. */
EMU_EXPORT int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    void *h, int mode, int ops, shape x, shape z, shape y, shape s, const void *a, size_t *bytes) {
  (void)h, (void)mode, (void)ops, (void)x, (void)z, (void)y, (void)s, (void)a;
  *bytes = 0;
  return SUCCESS;
}

EMU_EXPORT int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int mode, int ops,
                                                                 shape x, shape y, shape dy,
                                                                 shape dz, shape dx, shape ds,
                                                                 const void *a, size_t *bytes) {
  (void)h, (void)mode, (void)ops, (void)x, (void)y, (void)dy, (void)dz, (void)dx, (void)ds, (void)a;
  *bytes = 0;
  return SUCCESS;
}

EMU_EXPORT int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int mode, int ops,
                                                                    const void *a, shape x,
                                                                    size_t *bytes) {
  (void)h, (void)mode, (void)a;
  *bytes = ops == 0 ? 0 : (size_t)((elements(x) + 7) / 8);
  return SUCCESS;
}

#define LAUNCH(name)                            \
  EMU_EXPORT int name(void *handle) {           \
    if (!handle) return BAD_PARAM_NULL;         \
    emu_note_launch(#name, 1, 1, 1, 1, 1, 1);   \
    return SUCCESS;                             \
  }
LAUNCH(cudnnBatchNormalizationForwardTrainingEx)
LAUNCH(cudnnBatchNormalizationForwardTraining)
LAUNCH(cudnnBatchNormalizationForwardInference)
LAUNCH(cudnnBatchNormalizationBackwardEx)
LAUNCH(cudnnBatchNormalizationBackward)
LAUNCH(cudnnPoolingForward)
LAUNCH(cudnnPoolingBackward)
LAUNCH(cudnnSpatialTfGridGeneratorForward)
LAUNCH(cudnnSpatialTfGridGeneratorBackward)
LAUNCH(cudnnSpatialTfSamplerForward)
LAUNCH(cudnnSpatialTfSamplerBackward)
LAUNCH(cudnnCTCLoss)
LAUNCH(cudnnCTCLoss_v8)

/* Assumed: the probabilities once more, as floats. */
EMU_EXPORT int cudnnGetCTCLossWorkspaceSize(void *h, shape probabilities, shape gradients,
                                            const int *labels, const int *lengths,
                                            const int *inputs, int algorithm, const void *d,
                                            size_t *bytes) {
  (void)h, (void)gradients, (void)labels, (void)lengths, (void)inputs, (void)algorithm, (void)d;
  *bytes = (size_t)elements(probabilities) * 4;
  return SUCCESS;
}

EMU_EXPORT int cudnnGetCTCLossWorkspaceSize_v8(void *h, int algorithm, const void *d,
                                               shape probabilities, shape gradients,
                                               size_t *bytes) {
  (void)h, (void)algorithm, (void)d, (void)gradients;
  *bytes = (size_t)elements(probabilities) * 4;
  return SUCCESS;
}

LAUNCH(cudnnRNNForward)
LAUNCH(cudnnRNNBackwardData_v8)
LAUNCH(cudnnRNNBackwardWeights_v8)
