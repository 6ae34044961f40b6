/* Recurrent layers and dropout of cuDNN (part of cudnn.c): sizes, and where each weight lies.
 *
 * The order of weights in their space is what PyTorch checks for: for each layer and direction the
 * matrices of all gates on the input, then on the hidden state; behind all matrices the biases. The
 * sizes of workspace and reserve are not published; what is assumed is said where it is computed.
 */
#ifndef TUNER_CUDNN_RECURRENT_H
#define TUNER_CUDNN_RECURRENT_H

struct recurrent { /* cudnnSetRNNDescriptor_v8 */
  int cell;        /* 0, 1: relu, tanh; 2: LSTM; 3: GRU */
  int bias;        /* 0: none, 1 and 3: one, 2: two */
  int directions;
  int type;
  int64_t input, hidden, projection, layers;
};

struct sequences { /* cudnnSetRNNDataDescriptor */
  int type;
  int64_t steps, batch, width;
};

static int64_t gates(const struct recurrent *r) { return r->cell == 2 ? 4 : r->cell == 3 ? 3 : 1; }

static int64_t has_projection(const struct recurrent *r) {
  return r->cell == 2 && r->projection > 0 && r->projection != r->hidden;
}

static int64_t output_size(const struct recurrent *r) {
  return has_projection(r) ? r->projection : r->hidden;
}

static int64_t input_size(const struct recurrent *r, int64_t layer) {
  return layer < r->directions ? r->input : output_size(r) * r->directions;
}

/* Elements of all matrices of one layer and direction. */
static int64_t matrix_elements(const struct recurrent *r, int64_t layer) {
  int64_t n = gates(r) * r->hidden * (input_size(r, layer) + output_size(r));
  return has_projection(r) ? n + r->projection * r->hidden : n;
}

static int64_t biases(const struct recurrent *r) { return r->bias == 0 ? 0 : r->bias == 2 ? 2 : 1; }

static int64_t all_matrices(const struct recurrent *r, int64_t layers) {
  int64_t n = 0;
  for (int64_t layer = 0; layer < layers; layer++) n += matrix_elements(r, layer);
  return n;
}

EMU_EXPORT int cudnnSetRNNDescriptor_v8(struct recurrent *r, int algorithm, int cell, int bias,
                                        int bidirectional, int input_mode, int type, int precision,
                                        int math, int input, int hidden, int projection,
                                        int layers) {
  (void)algorithm, (void)input_mode, (void)precision, (void)math;
  if (!r) return BAD_PARAM_NULL;
  *r = (struct recurrent){cell, bias, bidirectional ? 2 : 1, type, input, hidden, projection, layers};
  return SUCCESS;
}

EMU_EXPORT int cudnnSetRNNDataDescriptor(struct sequences *s, int type, int layout, int steps,
                                         int batch, int width) {
  (void)layout;
  if (!s) return BAD_PARAM_NULL;
  *s = (struct sequences){type, steps, batch, width};
  return SUCCESS;
}

EMU_EXPORT int cudnnGetRNNWeightSpaceSize(void *h, const struct recurrent *r, size_t *bytes) {
  (void)h;
  int64_t layers = r->layers * r->directions;
  int64_t n = all_matrices(r, layers) + layers * gates(r) * biases(r) * r->hidden;
  *bytes = (size_t)(n * type_bytes(r->type));
  return SUCCESS;
}

/* Assumed: the workspace holds the gates of one layer for all steps; the reserve of training holds
 * for each layer the gates, the cell and the output. */
EMU_EXPORT int cudnnGetRNNTempSpaceSizes(void *h, const struct recurrent *r, int mode,
                                         const struct sequences *x, size_t *workspace,
                                         size_t *reserve) {
  (void)h;
  int64_t step = x->steps * x->batch * r->hidden * r->directions * type_bytes(r->type);
  if (workspace) *workspace = (size_t)(step * gates(r));
  if (reserve) *reserve = mode == 1 ? (size_t)(step * r->layers * (gates(r) + 2)) : 0;
  return SUCCESS;
}

static void describe(struct shape *s, int type, int64_t rows, int64_t columns) {
  if (s)
    *s = (struct shape){.dimensions = 3, .type = type, .size = {1, rows, columns},
                        .stride = {rows * columns, columns, 1}};
}

/* `id`: the gates on the input, the gates on the hidden state, then the projection. */
EMU_EXPORT int cudnnGetRNNWeightParams(void *h, const struct recurrent *r, int layer,
                                       size_t bytes, const char *space, int id, struct shape *m,
                                       const char **matrix, struct shape *b, const char **bias) {
  (void)h, (void)bytes;
  int64_t g = gates(r), in = input_size(r, layer), out = output_size(r), each = type_bytes(r->type);
  int64_t layers = r->layers * r->directions, at = all_matrices(r, layer);
  int projection = id >= 2 * g;
  if (projection && !has_projection(r)) {
    if (matrix) *matrix = NULL;
    if (bias) *bias = NULL;
    return SUCCESS;
  }
  at += id < g ? id * r->hidden * in : g * r->hidden * in + (id - g) * r->hidden * out;
  if (projection)
    describe(m, r->type, r->projection, r->hidden);
  else
    describe(m, r->type, r->hidden, id < g ? in : out);
  if (matrix) *matrix = space + at * each;
  int64_t biased = projection ? 0 : id < g ? biases(r) >= 1 : biases(r) == 2;
  int64_t first = all_matrices(r, layers) + (layer * g * biases(r) + id) * r->hidden;
  if (biased) describe(b, r->type, r->hidden, 1);
  if (bias) *bias = biased ? space + first * each : NULL;
  return SUCCESS;
}

/* -- dropout ------------------------------------------------------------------------------------ */

/* Assumed: a state of 48 bytes (XORWOW) for each of 1,024 threads of a multiprocessor. */
EMU_EXPORT int cudnnDropoutGetStatesSize(void *h, size_t *bytes) {
  (void)h;
  *bytes = (size_t)emu_config()->multiprocessors * 1024 * 48;
  return SUCCESS;
}

EMU_EXPORT int cudnnSetDropoutDescriptor(void *d) { return d ? SUCCESS : BAD_PARAM_NULL; }
EMU_EXPORT int cudnnRestoreDropoutDescriptor(void *d) { return d ? SUCCESS : BAD_PARAM_NULL; }

#endif
