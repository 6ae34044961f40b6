/* The backend API of cuDNN 9 (part of cudnn.c): descriptors, heuristics, plans.
 *
 * PyTorch reaches it through the frontend that is compiled into PyTorch: attention from compute
 * capability 9.0 on, and convolutions. Numbers of descriptors, attributes and types are those of
 * cudnn_graph_v9.h, cuDNN 9.1 to 9.28; a number has kept its meaning over these versions, and a new
 * attribute needs nothing here: attributes are kept as they were set and given back.
 *
 * Values hold references: a program may destroy a descriptor that it has put into another one.
 */
#ifndef TUNER_CUDNN_BACKEND_H
#define TUNER_CUDNN_BACKEND_H

enum { /* cudnnBackendDescriptorType_t */
  KIND_CONVOLUTION = 1,
  KIND_ENGINE = 2,
  KIND_ENGINE_CONFIG = 3,
  KIND_HEURISTIC = 4,
  KIND_PLAN = 5,
  KIND_FORWARD = 10,
  KIND_BACKWARD_FILTER = 11,
  KIND_BACKWARD_DATA = 12,
  KIND_GRAPH = 15,
  KIND_VARIANT_PACK = 16,
  KIND_TENSOR = 17,
  KIND_MATMUL_OPERATION = 19,
  KIND_ATTENTION_FORWARD = 41,
  KIND_ATTENTION_BACKWARD = 43
};

enum { /* cudnnBackendAttributeName_t */
  HEURISTIC_MODE = 200,
  HEURISTIC_GRAPH = 201,
  HEURISTIC_RESULTS = 202,
  CONFIG_ENGINE = 300,
  CONFIG_KNOBS = 302,
  CONFIG_WORKSPACE = 303,
  CONFIG_SHARED_MEMORY = 304,
  PLAN_CONFIG = 401,
  PLAN_WORKSPACE = 402,
  PLAN_JSON = 405,
  GRAPH_OPERATIONS = 801,
  GRAPH_ENGINE_COUNT = 802,
  TENSOR_TYPE = 901,
  TENSOR_DIMENSIONS = 902,
  TENSOR_STRIDES = 903,
  TENSOR_IS_VIRTUAL = 907,
  ENGINE_GRAPH = 1300,
  ENGINE_INDEX = 1301,
  ENGINE_KNOBS = 1302,
  ENGINE_NUMERICAL_NOTES = 1303,
  ENGINE_LAYOUTS = 1304,
  ENGINE_BEHAVIOR_NOTES = 1305,
  MATMUL_A = 1520,
  MATMUL_B = 1521,
  MATMUL_C = 1522
};

enum { TYPE_BOOLEAN = 2, TYPE_INT64 = 3, TYPE_NOTE = 11, TYPE_DESCRIPTOR = 15, TYPE_BEHAVIOR = 19,
       TYPE_INT32 = 23, TYPE_CHAR = 24 }; /* cudnnBackendAttributeType_t */
enum { NOTE_TENSOR_CORE = 0 }; /* cudnnBackendNumericalNote_t */
enum { MODE_FALLBACK = 2 };    /* cudnnBackendHeurMode_t */

/* Two engines are known: one on the tensor cores, and one without them. More indices than two are
 * let through, for the frontend asks for some engines of Blackwell by their number. */
enum { ENGINE_TENSOR_CORES = 0, ENGINE_PLAIN = 1, ENGINE_INDICES = 64 };

struct attribute {
  int name;
  int type;
  int64_t count;
  void *data; /* values; for TYPE_DESCRIPTOR, pointers to contents, each with a reference */
};

struct content {
  int references;
  int kind;
  int finalized;
  int attribute_count;
  struct attribute *attributes;
};

struct descriptor { /* what a cudnnBackendDescriptor_t points to */
  struct content *content;
};

static size_t element_bytes(int type) {
  switch (type) {
    case TYPE_BOOLEAN:
    case TYPE_CHAR: return 1;
    case 0:  /* handle */
    case TYPE_INT64:
    case 5:  /* double */
    case 6:  /* pointer */
    case TYPE_DESCRIPTOR: return 8;
    case 26: return 16; /* fraction */
    default: return 4;  /* float, int32 and all enumerations */
  }
}

/* -- contents and references -------------------------------------------------------------------- */

static struct content *keep(struct content *c) {
  if (c) __atomic_add_fetch(&c->references, 1, __ATOMIC_RELAXED);
  return c;
}

static void drop(struct content *c);

static void clear(struct attribute *a) {
  if (a->type == TYPE_DESCRIPTOR)
    for (int64_t i = 0; i < a->count; i++) drop(((struct content **)a->data)[i]);
  free(a->data);
  a->data = NULL;
  a->count = 0;
}

static void drop(struct content *c) {
  if (!c || __atomic_sub_fetch(&c->references, 1, __ATOMIC_ACQ_REL)) return;
  for (int i = 0; i < c->attribute_count; i++) clear(&c->attributes[i]);
  free(c->attributes);
  free(c);
}

static struct content *fresh(int kind) {
  struct content *c = calloc(1, sizeof *c);
  if (!c) return NULL;
  c->references = 1;
  c->kind = kind;
  return c;
}

static const struct attribute *look(const struct content *c, int name) {
  for (int i = 0; c && i < c->attribute_count; i++)
    if (c->attributes[i].name == name) return &c->attributes[i];
  return NULL;
}

static struct attribute *place(struct content *c, int name) {
  struct attribute *a = (struct attribute *)look(c, name);
  if (a) return a;
  a = realloc(c->attributes, (size_t)(c->attribute_count + 1) * sizeof *a);
  if (!a) return NULL;
  c->attributes = a;
  a += c->attribute_count++;
  memset(a, 0, sizeof *a);
  a->name = name;
  return a;
}

/* `values` holds contents where the type is TYPE_DESCRIPTOR; each gets a reference. */
static int put(struct content *c, int name, int type, int64_t count, const void *values) {
  size_t bytes = (size_t)count * element_bytes(type);
  void *data = malloc(bytes ? bytes : 1);
  struct attribute *a = data ? place(c, name) : NULL;
  if (!a) return free(data), ALLOC_FAILED;
  if (bytes) memcpy(data, values, bytes);
  for (int64_t i = 0; type == TYPE_DESCRIPTOR && i < count; i++) keep(((struct content **)data)[i]);
  clear(a);
  *a = (struct attribute){name, type, count, data};
  return SUCCESS;
}

static struct content *child(const struct content *c, int name) {
  const struct attribute *a = look(c, name);
  return a && a->type == TYPE_DESCRIPTOR && a->count > 0 ? *(struct content **)a->data : NULL;
}

static int64_t number(const struct content *c, int name, int64_t otherwise) {
  const struct attribute *a = look(c, name);
  if (!a || a->count < 1) return otherwise;
  switch (element_bytes(a->type)) {
    case 8: return *(int64_t *)a->data;
    case 1: return *(char *)a->data;
    default: return *(int32_t *)a->data;
  }
}

/* A private copy, for a content that several descriptors share and one of them changes. */
static struct content *copy(const struct content *from) {
  struct content *c = fresh(from->kind);
  for (int i = 0; c && i < from->attribute_count; i++) {
    const struct attribute *a = &from->attributes[i];
    put(c, a->name, a->type, a->count, a->data);
  }
  return c;
}

#include "cudnn_workspace.h"

/* -- heuristics --------------------------------------------------------------------------------- */

static void describe_engine(struct content *engine) {
  const int notes[] = {NOTE_TENSOR_CORE}; /* TensorFloat-32 has no other note */
  int count = number(engine, ENGINE_INDEX, ENGINE_TENSOR_CORES) != ENGINE_PLAIN;
  put(engine, ENGINE_NUMERICAL_NOTES, TYPE_NOTE, count, notes);
  put(engine, ENGINE_BEHAVIOR_NOTES, TYPE_BEHAVIOR, 0, NULL);
  engine->finalized = 1;
}

static void describe_config(struct content *config) {
  const struct content *engine = child(config, CONFIG_ENGINE);
  int64_t bytes = plan_workspace(child(engine, ENGINE_GRAPH),
                                 number(engine, ENGINE_INDEX, 0) != ENGINE_PLAIN);
  int32_t shared = emu_config()->shared_per_block_optin_bytes;
  put(config, CONFIG_WORKSPACE, TYPE_INT64, 1, &bytes);
  put(config, CONFIG_SHARED_MEMORY, TYPE_INT32, 1, &shared);
  if (!look(config, CONFIG_KNOBS)) put(config, CONFIG_KNOBS, TYPE_DESCRIPTOR, 0, NULL);
  config->finalized = 1;
}

static struct content *make_config(struct content *graph, int64_t index) {
  struct content *engine = fresh(KIND_ENGINE), *config = fresh(KIND_ENGINE_CONFIG);
  put(engine, ENGINE_GRAPH, TYPE_DESCRIPTOR, 1, &graph);
  put(engine, ENGINE_INDEX, TYPE_INT64, 1, &index);
  describe_engine(engine);
  put(config, CONFIG_ENGINE, TYPE_DESCRIPTOR, 1, &engine);
  drop(engine);
  describe_config(config);
  return config;
}

/* The modes that predict answer with both engines, best first; the fallback with the plain one.
 * Attention runs on the tensor cores only. */
static int answer(struct content *heuristic) {
  struct content *graph = child(heuristic, HEURISTIC_GRAPH), *results[2];
  if (!graph) return BAD_PARAM_NULL;
  int count = 0, attention = graph_is_attention(graph);
  int tensor_cores = number(heuristic, HEURISTIC_MODE, 0) != MODE_FALLBACK &&
                     has_tensor_cores(graph_type(graph));
  if (attention || tensor_cores)
    results[count++] = make_config(graph, ENGINE_TENSOR_CORES);
  if (!attention) results[count++] = make_config(graph, ENGINE_PLAIN);
  put(heuristic, HEURISTIC_RESULTS, TYPE_DESCRIPTOR, count, results);
  while (count) drop(results[--count]);
  return SUCCESS;
}

/* A plan read from JSON knows its workspace and nothing else; only plans written here are read. */
static int finish_plan(struct content *plan) {
  const struct attribute *json = look(plan, PLAN_JSON);
  long long bytes = 0;
  char text[160];
  if (child(plan, PLAN_CONFIG)) {
    bytes = number(child(plan, PLAN_CONFIG), CONFIG_WORKSPACE, 0);
    int n = snprintf(text, sizeof text, "{\"emulated_plan\": {\"workspace_bytes\": %lld}}", bytes);
    put(plan, PLAN_JSON, TYPE_CHAR, n, text);
  } else {
    snprintf(text, sizeof text, "%.*s", json ? (int)json->count : 0, json ? (char *)json->data : "");
    if (sscanf(text, "{\"emulated_plan\": {\"workspace_bytes\": %lld}}", &bytes) != 1)
      return SERIALIZATION_MISMATCH;
  }
  int64_t workspace = bytes;
  return put(plan, PLAN_WORKSPACE, TYPE_INT64, 1, &workspace);
}

/* -- the API ------------------------------------------------------------------------------------ */

EMU_EXPORT int cudnnBackendCreateDescriptor(int kind, struct descriptor **out) {
  if (!out) return BAD_PARAM_NULL;
  *out = calloc(1, sizeof **out);
  if (!*out || !((*out)->content = fresh(kind))) return ALLOC_FAILED;
  return SUCCESS;
}

EMU_EXPORT int cudnnBackendDestroyDescriptor(struct descriptor *d) {
  if (!d) return SUCCESS;
  drop(d->content);
  free(d);
  return SUCCESS;
}

EMU_EXPORT int cudnnBackendInitialize(struct descriptor *d) {
  return d ? SUCCESS : BAD_PARAM_NULL;
}

EMU_EXPORT int cudnnBackendFinalize(struct descriptor *d) {
  if (!d) return BAD_PARAM_NULL;
  struct content *c = d->content;
  int status = SUCCESS;
  int64_t engines = ENGINE_INDICES;
  if (c->kind == KIND_HEURISTIC) status = answer(c);
  if (c->kind == KIND_ENGINE) describe_engine(c);
  if (c->kind == KIND_ENGINE_CONFIG) describe_config(c);
  if (c->kind == KIND_PLAN) status = finish_plan(c);
  if (c->kind == KIND_GRAPH) put(c, GRAPH_ENGINE_COUNT, TYPE_INT64, 1, &engines);
  c->finalized = status == SUCCESS;
  return status;
}

EMU_EXPORT int cudnnBackendSetAttribute(struct descriptor *d, int name, int type, int64_t count,
                                        const void *values) {
  if (!d || (count && !values)) return BAD_PARAM_NULL;
  if (count < 0) return BAD_PARAM;
  if (__atomic_load_n(&d->content->references, __ATOMIC_ACQUIRE) > 1) {
    struct content *own = copy(d->content);
    drop(d->content);
    d->content = own;
  }
  if (type != TYPE_DESCRIPTOR) return put(d->content, name, type, count, values);
  struct content **contents = calloc((size_t)count + 1, sizeof *contents);
  for (int64_t i = 0; i < count; i++) {
    const struct descriptor *given = ((struct descriptor *const *)values)[i];
    contents[i] = given ? given->content : NULL;
  }
  int status = put(d->content, name, type, count, contents);
  free(contents);
  return status;
}

/* Lists that may be empty; any other attribute that was not set is an error. */
static int may_be_empty(int name) {
  return name == ENGINE_KNOBS || name == ENGINE_LAYOUTS || name == CONFIG_KNOBS ||
         name == ENGINE_NUMERICAL_NOTES || name == ENGINE_BEHAVIOR_NOTES;
}

EMU_EXPORT int cudnnBackendGetAttribute(const struct descriptor *d, int name, int type,
                                        int64_t requested, int64_t *count, void *values) {
  if (!d) return BAD_PARAM_NULL;
  const struct attribute *a = look(d->content, name);
  if (count) *count = a ? a->count : 0;
  if (!a) return may_be_empty(name) ? SUCCESS : BAD_PARAM;
  if (a->type != type) return BAD_PARAM_TYPE;
  int64_t given = requested < a->count ? requested : a->count;
  if (!values || given <= 0) return SUCCESS;
  if (type != TYPE_DESCRIPTOR) {
    memcpy(values, a->data, (size_t)given * element_bytes(type));
    return SUCCESS;
  }
  for (int64_t i = 0; i < given; i++) { /* descriptors of the caller take on the contents */
    struct descriptor *out = ((struct descriptor **)values)[i];
    if (!out) return BAD_PARAM_NULL;
    struct content *before = out->content;
    out->content = keep(((struct content **)a->data)[i]);
    drop(before);
  }
  if (count) *count = given;
  return SUCCESS;
}

EMU_EXPORT int cudnnGetExecutionPlanWorkspaceSize(void *handle, const struct descriptor *plan,
                                                 const struct descriptor *pack, size_t *bytes) {
  if (!handle || !plan || !pack || !bytes) return BAD_PARAM_NULL;
  *bytes = (size_t)number(plan->content, PLAN_WORKSPACE, 0);
  return SUCCESS;
}

EMU_EXPORT int cudnnBackendExecute(void *handle, const struct descriptor *plan,
                                   const struct descriptor *pack) {
  if (!handle || !plan || !pack) return BAD_PARAM_NULL;
  note_graph(child(child(child(plan->content, PLAN_CONFIG), CONFIG_ENGINE), ENGINE_GRAPH));
  return SUCCESS;
}

#endif
