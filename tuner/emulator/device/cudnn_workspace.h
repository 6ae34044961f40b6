/* What a graph of cuDNN operations is, and the workspace of its plan (part of cudnn.c).
 *
 * NVIDIA does not publish how much workspace an engine takes, so all of this is assumed:
 *
 * - Attention as a graph of products and pointwise operations (what PyTorch 2.8 to 2.14 build): no
 *   workspace of the engine. What is known to be large is not cuDNN's but the frontend's, compiled
 *   into PyTorch, and is therefore exact: the float accumulator of dQ (b h s d 4 bytes) and the sums
 *   of the softmax (b h s 4). Where the frontend builds the graph without that accumulator (gradients
 *   of a mask, deterministic algorithms), dP has to be kept: b h s s 2 bytes with the lengths rounded
 *   up to 64, which is how the frontend itself reckons it. With grouped heads, dK and dV are taken
 *   to be summed in place.
 * - Attention as one operation (SDPA_BWD): accumulator and sums, since then the engine holds them.
 * - Convolutions on the tensor cores work on channels-last tensors, with channels in vectors of 16
 *   bytes. A tensor that lies otherwise is converted on the way (the kernels nchwToNhwc and
 *   nhwcToNchw of profiles): the workspace holds one such copy of it. Channels-last tensors and
 *   depthwise convolutions need none. A split sum over the filter's gradient is not counted.
 * - Convolutions without tensor cores (float before capability 8.0, or where PyTorch may not use
 *   TensorFloat-32): implicit products, none.
 */
#ifndef TUNER_CUDNN_WORKSPACE_H
#define TUNER_CUDNN_WORKSPACE_H

enum { TYPE_FLOAT = 0, MOST_DIMENSIONS = 8 }; /* CUDNN_DATA_FLOAT, CUDNN_DIM_MAX */

struct shape {
  int dimensions;
  int type; /* cudnnDataType_t */
  int64_t size[MOST_DIMENSIONS];
  int64_t stride[MOST_DIMENSIONS];
};

static int64_t type_bytes(int type) {
  switch (type) {
    case 1: case 10: case 20: return 8;  /* double, int64, complex of floats */
    case 2: case 9: return 2;            /* half, bfloat16 */
    case 3: case 6: case 11: case 12: case 13: case 15: return 1; /* 8 bits */
    case 21: return 16;                  /* complex of doubles */
    default: return 4;
  }
}

static int64_t elements(const struct shape *s) {
  int64_t n = 1;
  for (int i = 0; i < s->dimensions; i++) n *= s->size[i];
  return n;
}

/* Half precision has them on all types of GPU since Volta, floats (as TensorFloat-32) from 8.0 on. */
static int has_tensor_cores(int type) {
  return type_bytes(type) < 4 || (type == TYPE_FLOAT && emu_config()->capability_major >= 8);
}

/* -- convolutions, of the backend and of the older API ------------------------------------------ */

enum convolution { CONVOLVE, GRADIENT_OF_FILTER, GRADIENT_OF_DATA };

static int is_channels_last(const struct shape *s) {
  return s->size[1] == 1 || s->stride[1] == 1;
}

static int64_t converted_bytes(const struct shape *s) {
  if (s->dimensions < 3 || is_channels_last(s)) return 0;
  int64_t vector = 16 / type_bytes(s->type);
  int64_t channels = (s->size[1] + vector - 1) / vector * vector;
  int64_t bytes = elements(s) / (s->size[1] ? s->size[1] : 1) * channels * type_bytes(s->type);
  return (bytes + 255) / 256 * 256;
}

static int64_t convolution_workspace(const struct shape *x, const struct shape *w,
                                     const struct shape *y, int tensor_cores) {
  int64_t depthwise = x->size[1] > 1 && w->size[1] == 1;
  if (!tensor_cores || depthwise || !has_tensor_cores(x->type)) return 0;
  return converted_bytes(x) + converted_bytes(w) + converted_bytes(y);
}

/* As a product: m rows of the result, n of its channels, k summands each; and the groups. */
static void note_convolution(enum convolution what, const struct shape *x, const struct shape *w,
                             const struct shape *y) {
  static const char *const names[] = {"cudnnConvolutionForward", "cudnnConvolutionBackwardFilter",
                                      "cudnnConvolutionBackwardData"};
  int64_t rows = y->size[1] ? elements(y) / y->size[1] : 0;
  int64_t summands = w->size[0] ? elements(w) / w->size[0] : 0;
  int64_t groups = w->size[1] ? x->size[1] / w->size[1] : 1;
  emu_note_launch(names[what], (unsigned)rows, (unsigned)w->size[0], (unsigned)summands,
                  (unsigned)groups, (unsigned)x->type, 0);
}

/* -- graphs of the backend ---------------------------------------------------------------------- */

static int read_shape(const struct content *tensor, struct shape *s) {
  const struct attribute *size = look(tensor, TENSOR_DIMENSIONS);
  const struct attribute *stride = look(tensor, TENSOR_STRIDES);
  memset(s, 0, sizeof *s);
  if (!size || !stride || size->count > MOST_DIMENSIONS || stride->count != size->count) return 0;
  s->dimensions = (int)size->count;
  s->type = (int)number(tensor, TENSOR_TYPE, TYPE_FLOAT);
  memcpy(s->size, size->data, (size_t)size->count * sizeof(int64_t));
  memcpy(s->stride, stride->data, (size_t)size->count * sizeof(int64_t));
  return s->dimensions >= 2;
}

static const struct content *operation(const struct content *graph, int64_t i) {
  const struct attribute *all = look(graph, GRAPH_OPERATIONS);
  return all && i < all->count ? ((struct content **)all->data)[i] : NULL;
}

/* CUDNN_ATTR_OPERATION_CONVOLUTION_*: the tensors of each kind */
static int convolution_shapes(const struct content *op, struct shape *x, struct shape *w,
                              struct shape *y, enum convolution *what) {
  static const int names[3][3] = {{704, 703, 705}, {716, 715, 717}, {710, 709, 711}};
  if (!op || op->kind < KIND_FORWARD || op->kind > KIND_BACKWARD_DATA) return 0;
  *what = (enum convolution)(op->kind - KIND_FORWARD);
  const int *n = names[*what];
  return read_shape(child(op, n[0]), x) && read_shape(child(op, n[1]), w) &&
         read_shape(child(op, n[2]), y);
}

static int count_products(const struct content *graph) {
  int n = 0;
  for (int64_t i = 0; operation(graph, i); i++)
    n += operation(graph, i)->kind == KIND_MATMUL_OPERATION;
  return n;
}

/* Attention is one operation, or a graph of two products forward and five backward. */
static int graph_is_attention(const struct content *graph) {
  for (int64_t i = 0; operation(graph, i); i++) {
    int kind = operation(graph, i)->kind;
    if (kind == KIND_ATTENTION_FORWARD || kind == KIND_ATTENTION_BACKWARD) return 1;
  }
  return count_products(graph) >= 2;
}

/* The type of the first tensor of a convolution or a product: what the graph computes in. */
static int graph_type(const struct content *graph) {
  struct shape x, w, y;
  enum convolution what;
  for (int64_t i = 0; operation(graph, i); i++) {
    if (convolution_shapes(operation(graph, i), &x, &w, &y, &what)) return x.type;
    if (read_shape(child(operation(graph, i), MATMUL_A), &x)) return x.type;
  }
  return TYPE_FLOAT;
}

/* CUDNN_ATTR_OPERATION_SDPA_BWD_QDESC is 2851. */
static int64_t attention_backward_bytes(const struct content *op) {
  struct shape q;
  if (!read_shape(child(op, 2851), &q) || q.dimensions != 4) return 0;
  return q.size[0] * q.size[1] * q.size[2] * (q.size[3] + 1) * 4;
}

/* The backward graph has five products; without a float result in memory, dQ is not accumulated,
 * and dP is kept. Q times K transposed is the first product. */
static int64_t kept_gradient_bytes(const struct content *graph) {
  struct shape q = {0}, k = {0}, c;
  if (count_products(graph) < 5) return 0;
  for (int64_t i = 0; operation(graph, i); i++) {
    const struct content *op = operation(graph, i), *result = child(op, MATMUL_C);
    if (op->kind != KIND_MATMUL_OPERATION) continue;
    if (!q.dimensions && !(read_shape(child(op, MATMUL_A), &q) &&
                           read_shape(child(op, MATMUL_B), &k)))
      return 0;
    if (read_shape(result, &c) && c.type == TYPE_FLOAT && !number(result, TENSOR_IS_VIRTUAL, 0))
      return 0;
  }
  if (q.dimensions != 4) return 0;
  return q.size[0] * q.size[1] * ((q.size[2] + 63) / 64 * 64) * ((k.size[3] + 63) / 64 * 64) * 2;
}

static int64_t plan_workspace(const struct content *graph, int tensor_cores) {
  struct shape x, w, y;
  enum convolution what;
  int64_t bytes = kept_gradient_bytes(graph);
  for (int64_t i = 0; operation(graph, i); i++) {
    const struct content *op = operation(graph, i);
    if (convolution_shapes(op, &x, &w, &y, &what))
      bytes += convolution_workspace(&x, &w, &y, tensor_cores);
    if (op->kind == KIND_ATTENTION_BACKWARD) bytes += attention_backward_bytes(op);
  }
  return bytes;
}

/* One launch for a plan. For attention: heads of all samples, queries, keys; then the size of a
 * head and the type. */
static void note_attention(const struct content *graph) {
  const struct content *op = operation(graph, 0);
  struct shape q = {0}, k = {0};
  int backward = op->kind == KIND_ATTENTION_BACKWARD || count_products(graph) > 2, found = 0;
  for (int64_t i = 0; !found && (op = operation(graph, i)); i++) {
    if (op->kind == KIND_MATMUL_OPERATION) /* K stands transposed: its last side are the keys */
      found = read_shape(child(op, MATMUL_A), &q) && read_shape(child(op, MATMUL_B), &k);
    else if (op->kind == KIND_ATTENTION_FORWARD || op->kind == KIND_ATTENTION_BACKWARD) {
      int first = op->kind == KIND_ATTENTION_FORWARD ? 2800 : 2851;
      found = read_shape(child(op, first), &q) && read_shape(child(op, first + 1), &k);
      k.size[3] = k.size[2];
    }
  }
  if (found)
    emu_note_launch(backward ? "cudnnAttentionBackward" : "cudnnAttentionForward",
                    (unsigned)(q.size[0] * q.size[1]), (unsigned)q.size[2], (unsigned)k.size[3],
                    (unsigned)q.size[3], (unsigned)q.type, 0);
}

static void note_graph(const struct content *graph) {
  struct shape x, w, y;
  enum convolution what;
  if (!operation(graph, 0)) return;
  if (graph_is_attention(graph)) {
    note_attention(graph);
    return;
  }
  for (int64_t i = 0; operation(graph, i); i++)
    if (convolution_shapes(operation(graph, i), &x, &w, &y, &what)) {
      note_convolution(what, &x, &w, &y);
      return;
    }
  emu_note_launch("cudnnBackendExecute", 1, 1, 1, 1, 1, 1);
}

#endif
