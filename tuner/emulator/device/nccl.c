/* NCCL 2: communicators, collectives that are noted, and small values that are carried.
 *
 * Signatures and numbers are those of nccl.h, NCCL 2.26 to 2.32. A collective is noted as a launch
 * named after its function, with its bytes in the grid (low half, high half, ranks) and its type and
 * reduction in the block. What is carried between processes, and how, says nccl_exchange.h:
 *
 * - integers up to CARRIED_INTEGER_BYTES (of one byte: CARRIED_BYTE_BYTES, enough for objects and not
 *   for quantized weights) and other types up to CARRIED_FLOAT_BYTES, for each rank's share;
 * - anything else moves nothing: a reduction leaves the result as it was (in place: as the rank's own
 *   share), a gather and a broadcast leave what the receiver had. Integers that are not carried are
 *   counted as unknown, since a program might decide by them.
 *
 * Where one process stands for all ranks (emu_config()->one_rank), the others are taken to post what
 * this rank posts: perform_alike and exchange_alike.
 *
 * A receive outside of a group waits for its sender, where the library would only queue it: two
 * ranks that both receive before they send, on purpose, would wait for each other here.
 *
 * A communicator takes the device memory of its buffers (emu_config()->nccl_bytes, tuner/cost/library_memory.py)
 * with its first collective, as the library does, which connects then (NCCL_RUNTIME_CONNECT).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "device.h"
#include "versions.h"

enum { /* ncclResult_t */
  SUCCESS = 0,
  CUDA_ERROR = 1,
  SYSTEM_ERROR = 2,
  INTERNAL_ERROR = 3,
  INVALID_ARGUMENT = 4,
  INVALID_USAGE = 5,
  REMOTE_ERROR = 6
};

enum {
  CARRIED_INTEGER_BYTES = 64 << 20,
  CARRIED_BYTE_BYTES = 16 << 20,
  CARRIED_FLOAT_BYTES = 64 << 10
};

static __thread char last_message[160];

#include "nccl_exchange.h"
#include "nccl_reduce.h"

#include "nccl_operations.h"

/* -- the library -------------------------------------------------------------------------------- */

EMU_EXPORT int ncclGetVersion(int *version) {
  if (!version) return INVALID_ARGUMENT;
  *version = EMU_NCCL_VERSION;
  return SUCCESS;
}

EMU_EXPORT const char *ncclGetErrorString(int result) {
  static const char *const texts[] = {
      "no error", "unhandled cuda error", "unhandled system error", "internal error",
      "invalid argument", "invalid usage",
      "remote process exited or there was a network error", "NCCL operation in progress"};
  if (result == INVALID_USAGE && last_message[0]) return last_message; /* some callers ask no more */
  return result >= 0 && result <= 7 ? texts[result] : "unknown result code";
}

EMU_EXPORT const char *ncclGetLastError(const struct communicator *c) {
  return c && c->message[0] ? c->message : last_message;
}

EMU_EXPORT int ncclGroupStart(void) {
  group.depth++;
  return SUCCESS;
}

EMU_EXPORT int ncclGroupEnd(void) { return group_end(); }

EMU_EXPORT int ncclGroupSimulateEnd(void *info) {
  (void)info;
  return group_end();
}

/* -- communicators ------------------------------------------------------------------------------ */

EMU_EXPORT int ncclGetUniqueId(struct unique_id *id) {
  if (!id) return INVALID_ARGUMENT;
  return make_id(id) ? SYSTEM_ERROR : SUCCESS;
}

static int initialize(struct communicator **out, int size, const struct unique_id *id, int rank,
                      int device, int alone) {
  if (!out || size < 1 || size > MOST_RANKS || rank < 0 || rank >= size) return INVALID_ARGUMENT;
  if (emu_physical(device) < 0) return CUDA_ERROR;
  emu_touch(emu_physical(device));
  struct communicator *c = new_communicator((uint32_t)size, (uint32_t)rank, device);
  if (!c) return SYSTEM_ERROR;
  *out = NULL;
  if (size == 1 || alone) return close_made(id ? id->nonce : 0), *out = c, SUCCESS;
  struct file *f = open_id(id);
  if (!f || enter_region(c, f, 0, 0, 0)) {
    free_communicator(c);
    snprintf(last_message, sizeof last_message, "the process that made the unique id has ended");
    return SYSTEM_ERROR;
  }
  group.depth++;
  struct operation *o = add(ATTACH, c);
  if (o) o->nonce = id->nonce, o->made = out;
  return group_end();
}

EMU_EXPORT int ncclCommInitRank(struct communicator **out, int size, struct unique_id id,
                                int rank) {
  return initialize(out, size, &id, rank, emu_current(), emu_config()->one_rank);
}

EMU_EXPORT int ncclCommInitRankConfig(struct communicator **out, int size, struct unique_id id,
                                      int rank, const void *config) {
  (void)config;
  return initialize(out, size, &id, rank, emu_current(), emu_config()->one_rank);
}

EMU_EXPORT int ncclCommInitRankScalable(struct communicator **out, int size, int rank, int ids,
                                        const struct unique_id *id, const void *config) {
  (void)config;
  return ids < 1 || !id ? INVALID_ARGUMENT
                         : initialize(out, size, id, rank, emu_current(), emu_config()->one_rank);
}

/* All ranks in this process, one for each device. */
EMU_EXPORT int ncclCommInitAll(struct communicator **out, int size, const int *devices) {
  struct unique_id id;
  int status = make_id(&id) ? SYSTEM_ERROR : SUCCESS;
  group.depth++;
  for (int rank = 0; rank < size && status == SUCCESS; rank++)
    status = initialize(&out[rank], size, &id, rank, devices ? devices[rank] : rank, 0);
  int ended = group_end();
  return status ? status : ended;
}

EMU_EXPORT int ncclCommSplit(struct communicator *c, int color, int key,
                             struct communicator **out, const void *config) {
  (void)config;
  if (!c || !out) return INVALID_ARGUMENT;
  *out = NULL;
  if (c->size == 1) {
    if (color >= 0) *out = new_communicator(1, 0, c->device);
    return SUCCESS;
  }
  if (!c->region) return fail(c, INVALID_USAGE, NEEDS_ALL, -1);
  group.depth++;
  struct operation *o = add(SPLIT, c);
  if (o && (o->choices = calloc(c->size, 2 * sizeof(int32_t)))) {
    o->color = color < 0 ? -1 : color;
    o->key = key;
    o->bytes = 2 * sizeof(int32_t);
    o->send = (const char *)&o->color; /* color and key lie side by side */
    o->receive = (char *)o->choices;
    o->type = INT32;
    o->made = out;
  }
  return group_end();
}

/* The ranks that remain know it all by themselves; they only have to meet. */
EMU_EXPORT int ncclCommShrink(struct communicator *c, const int *excluded, int count,
                              struct communicator **out, const void *config, int flags) {
  (void)config, (void)flags;
  if (!c || !out || count < 0 || count >= (int)c->size) return INVALID_ARGUMENT;
  uint32_t rank = c->rank;
  for (int i = 0; i < count; i++) {
    if (excluded[i] == (int)c->rank) return INVALID_USAGE;
    rank -= excluded[i] < (int)c->rank;
  }
  struct communicator *child = new_communicator(c->size - (uint32_t)count, rank, c->device);
  if (!child) return SYSTEM_ERROR;
  *out = NULL;
  if (child->size == 1 || !c->region) return *out = child, SUCCESS;
  __atomic_add_fetch(&c->file->references, 1, __ATOMIC_RELAXED);
  if (enter_region(child, c->file, c->offset, ++c->generation, INT32_MAX)) return SYSTEM_ERROR;
  group.depth++;
  struct operation *o = add(ATTACH, child);
  if (o) o->made = out;
  return group_end();
}

EMU_EXPORT int ncclCommFinalize(struct communicator *c) {
  return c ? SUCCESS : INVALID_ARGUMENT;
}

EMU_EXPORT int ncclCommDestroy(struct communicator *c) {
  if (c) free_communicator(c);
  return SUCCESS;
}

/* Another thread may wait in it: that thread returns, and the memory stays. */
EMU_EXPORT int ncclCommAbort(struct communicator *c) {
  if (c) c->aborted = 1;
  return SUCCESS;
}

EMU_EXPORT int ncclCommRevoke(struct communicator *c, int flags) {
  (void)flags;
  return ncclCommAbort(c);
}

#define ASKED(name, field)                                        \
  EMU_EXPORT int name(const struct communicator *c, int *value) { \
    if (!c || !value) return INVALID_ARGUMENT;                    \
    *value = (int)c->field;                                       \
    return SUCCESS;                                               \
  }
ASKED(ncclCommCount, size)
ASKED(ncclCommUserRank, rank)
ASKED(ncclCommCuDevice, device)
ASKED(ncclCommGetAsyncError, error)

EMU_EXPORT int ncclCommMemStats(struct communicator *c, int what, uint64_t *value) {
  (void)what;
  if (!c || !value) return INVALID_ARGUMENT;
  *value = c->buffer_bytes;
  return SUCCESS;
}

EMU_EXPORT int ncclCommSuspend(struct communicator *c, int flags) {
  (void)flags;
  return c ? SUCCESS : INVALID_ARGUMENT;
}

EMU_EXPORT int ncclCommResume(struct communicator *c) { return c ? SUCCESS : INVALID_ARGUMENT; }

/* -- memory ------------------------------------------------------------------------------------- */

EMU_EXPORT int ncclMemAlloc(void **out, size_t bytes) {
  if (!out) return INVALID_ARGUMENT;
  *out = NULL;
  return emu_alloc(emu_current_physical(), bytes, out) ? CUDA_ERROR : SUCCESS;
}

EMU_EXPORT int ncclMemFree(void *p) {
  return !p || emu_free(p) == 0 ? SUCCESS : INVALID_ARGUMENT;
}

struct registration {
  void *address;
};

static int registered(void *address, void **out) {
  struct registration *r = calloc(1, sizeof *r);
  if (!out || !r) return free(r), SYSTEM_ERROR;
  r->address = address;
  *out = r;
  return SUCCESS;
}

EMU_EXPORT int ncclCommRegister(struct communicator *c, void *address, size_t bytes, void **out) {
  (void)bytes;
  return c ? registered(address, out) : INVALID_ARGUMENT;
}

EMU_EXPORT int ncclCommDeregister(struct communicator *c, void *handle) {
  (void)c;
  free(handle);
  return SUCCESS;
}

EMU_EXPORT int ncclCommWindowRegister(struct communicator *c, void *address, size_t bytes,
                                      void **out, int flags) {
  (void)bytes, (void)flags;
  return c ? registered(address, out) : INVALID_ARGUMENT;
}

EMU_EXPORT int ncclCommWindowDeregister(struct communicator *c, void *window) {
  (void)c;
  free(window);
  return SUCCESS;
}

EMU_EXPORT int ncclWinGetUserPtr(struct communicator *c, const struct registration *window,
                                 void **address) {
  if (!c || !window || !address) return INVALID_ARGUMENT;
  *address = window->address;
  return SUCCESS;
}

/* -- collectives -------------------------------------------------------------------------------- */

EMU_EXPORT int ncclRedOpCreatePreMulSum(int *operation, const void *scalar, int type,
                                        int residence, struct communicator *c) {
  (void)residence; /* of the host or of the device: both can be read here */
  if (!c || !operation || !scalar || !type_bytes(type)) return INVALID_ARGUMENT;
  int own = c->own_operations++ % MOST_OWN_OPERATIONS;
  c->factors[own] = is_integer(type) ? (double)read_integer(scalar, type)
                    : type > BFLOAT16 ? 1.0
                                      : read_float(scalar, type);
  *operation = OPERATIONS + own;
  return SUCCESS;
}

EMU_EXPORT int ncclRedOpDestroy(int operation, struct communicator *c) {
  (void)operation;
  return c ? SUCCESS : INVALID_ARGUMENT;
}

static int is_carried(const char *name, size_t bytes, int type) {
  if (!is_integer(type)) return bytes <= CARRIED_FLOAT_BYTES;
  if (bytes <= (size_t)(type_bytes(type) == 1 ? CARRIED_BYTE_BYTES : CARRIED_INTEGER_BYTES))
    return 1;
  emu_unknown(name);
  return 0;
}

/* A communicator without a region: one process, alone or in the place of all ranks. Every rank has
 * what this one has. Integers that only another rank has are an error: a program may decide by
 * them. */
static int perform_alike(enum kind kind, const char *send, char *receive, size_t bytes, int type,
                         int reduction, uint32_t root, struct communicator *c) {
  const char *meant = send + c->rank * bytes; /* by each rank, for this one */
  int joins = kind == ALL_REDUCE || kind == REDUCE || kind == REDUCE_SCATTER;
  int rooted = kind == REDUCE || kind == GATHER || kind == BROADCAST || kind == SCATTER;
  if (rooted && root != c->rank) {
    if (!is_integer(type) || kind == REDUCE || kind == GATHER) return SUCCESS;
    return fail(c, INVALID_USAGE, NEEDS_ALL, (int)root);
  }
  if (!send || !receive) return SUCCESS;
  if (joins) {
    int own = reduction >= OPERATIONS;
    reduce(receive, kind == REDUCE_SCATTER ? meant : send, 0, c->size, bytes / type_bytes(type),
           type, own ? SUM : reduction, own ? c->factors[reduction - OPERATIONS] : 1.0);
  } else if (kind == BROADCAST || kind == SCATTER) {
    copy_changed(receive, kind == SCATTER ? meant : send, bytes);
  } else {
    for (uint32_t rank = 0; rank < c->size; rank++)
      copy_changed(receive + rank * bytes, kind == ALL_TO_ALL ? meant : send, bytes);
  }
  return SUCCESS;
}

static int take_buffers(struct communicator *c) {
  uint32_t size = c->size < EMU_NCCL_RANKS ? c->size : EMU_NCCL_RANKS;
  uint64_t wanted = size > 1 ? emu_config()->nccl_bytes[size] : 0;
  if (c->buffer_bytes == wanted) return SUCCESS;
  if (emu_take(emu_physical(c->device), wanted))
    return fail(c, CUDA_ERROR, "NCCL's buffers: CUDA failure 2 'out of memory'", 0);
  c->buffer_bytes = wanted;
  return SUCCESS;
}

static int perform(const char *name, const char *uncarried, enum kind kind, const void *send,
                   void *receive, size_t count, int type, int reduction, int root,
                   struct communicator *c) {
  size_t bytes = count * type_bytes(type);
  if (!c || !type_bytes(type) || root < 0 || root >= (int)c->size) return INVALID_ARGUMENT;
  if (reduction < 0 || reduction >= OPERATIONS + MOST_OWN_OPERATIONS) return INVALID_ARGUMENT;
  if (c->error) return c->error;
  if (!bytes) return SUCCESS;
  emu_note_launch(name, (unsigned)bytes, (unsigned)((uint64_t)bytes >> 32), c->size,
                  (unsigned)type, (unsigned)reduction, 0);
  int lane = kind == SEND || kind == RECEIVE;
  if (!lane && take_buffers(c)) return c->error;
  /* A broadcast in place from the one process of all ranks: all have what it has already. */
  if (!c->region && kind == BROADCAST && send == receive && (uint32_t)root == c->rank)
    return SUCCESS;
  int carried = is_carried(uncarried, bytes, type);
  if (!carried && (c->region || !lane)) return SUCCESS;
  if (!c->region && !lane)
    return perform_alike(kind, send, receive, bytes, type, reduction, (uint32_t)root, c);
  group.depth++;
  struct operation *o = add(kind, c);
  if (o) {
    o->send = send;
    o->receive = receive;
    o->bytes = bytes;
    o->type = type;
    o->reduction = reduction;
    o->root = (uint32_t)root;
    o->carried = carried;
  }
  return group_end();
}

#define PERFORM(name, kind, send, receive, count, type, reduction, root, comm)                  \
  perform(#name, #name " of many integers (values not carried)", kind, send, receive, count,    \
          type, reduction, root, comm)

EMU_EXPORT int ncclAllReduce(const void *send, void *receive, size_t count, int type,
                             int reduction, struct communicator *c, void *stream) {
  (void)stream;
  return PERFORM(ncclAllReduce, ALL_REDUCE, send, receive, count, type, reduction, 0, c);
}

EMU_EXPORT int ncclReduce(const void *send, void *receive, size_t count, int type, int reduction,
                          int root, struct communicator *c, void *stream) {
  (void)stream;
  return PERFORM(ncclReduce, REDUCE, send, receive, count, type, reduction, root, c);
}

EMU_EXPORT int ncclBroadcast(const void *send, void *receive, size_t count, int type, int root,
                             struct communicator *c, void *stream) {
  (void)stream;
  return PERFORM(ncclBroadcast, BROADCAST, send, receive, count, type, 0, root, c);
}

EMU_EXPORT int ncclBcast(void *buffer, size_t count, int type, int root, struct communicator *c,
                         void *stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, c, stream);
}

EMU_EXPORT int ncclAllGather(const void *send, void *receive, size_t count, int type,
                             struct communicator *c, void *stream) {
  (void)stream;
  return PERFORM(ncclAllGather, ALL_GATHER, send, receive, count, type, 0, 0, c);
}

EMU_EXPORT int ncclReduceScatter(const void *send, void *receive, size_t count, int type,
                                 int reduction, struct communicator *c, void *stream) {
  (void)stream;
  return PERFORM(ncclReduceScatter, REDUCE_SCATTER, send, receive, count, type, reduction, 0, c);
}

EMU_EXPORT int ncclAlltoAll(const void *send, void *receive, size_t count, int type,
                            struct communicator *c, void *stream) {
  (void)stream;
  return PERFORM(ncclAlltoAll, ALL_TO_ALL, send, receive, count, type, 0, 0, c);
}

EMU_EXPORT int ncclGather(const void *send, void *receive, size_t count, int type, int root,
                          struct communicator *c, void *stream) {
  (void)stream;
  return PERFORM(ncclGather, GATHER, send, receive, count, type, 0, root, c);
}

EMU_EXPORT int ncclScatter(const void *send, void *receive, size_t count, int type, int root,
                           struct communicator *c, void *stream) {
  (void)stream;
  return PERFORM(ncclScatter, SCATTER, send, receive, count, type, 0, root, c);
}

EMU_EXPORT int ncclSend(const void *send, size_t count, int type, int peer,
                        struct communicator *c, void *stream) {
  (void)stream;
  return PERFORM(ncclSend, SEND, send, NULL, count, type, 0, peer, c);
}

EMU_EXPORT int ncclRecv(void *receive, size_t count, int type, int peer, struct communicator *c,
                        void *stream) {
  (void)stream;
  return PERFORM(ncclRecv, RECEIVE, NULL, receive, count, type, 0, peer, c);
}

/* NCCL 2.32 has each collective with settings as a last argument, which nothing here asks for. */
#define WITH_SETTINGS(name) EMU_EXPORT int name##Config() __attribute__((alias(#name)));
WITH_SETTINGS(ncclAllReduce)
WITH_SETTINGS(ncclReduce)
WITH_SETTINGS(ncclBroadcast)
WITH_SETTINGS(ncclAllGather)
WITH_SETTINGS(ncclReduceScatter)
WITH_SETTINGS(ncclAlltoAll)
WITH_SETTINGS(ncclGather)
WITH_SETTINGS(ncclScatter)
