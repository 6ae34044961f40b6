/* Operations that carry values, one step at a time (part of nccl.c).
 *
 * Everything that may have to wait is an operation that can be stepped: a group (ncclGroupStart to
 * ncclGroupEnd) steps all of its operations in turn, so that a process may drive several ranks and
 * may send and receive in any order. Outside of a group it is a group of one.
 */
#ifndef TUNER_NCCL_OPERATIONS_H
#define TUNER_NCCL_OPERATIONS_H

enum kind { ATTACH, SPLIT, ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL,
            GATHER, SCATTER, SEND, RECEIVE };

enum { MOST_OWN_OPERATIONS = 64 };

#define NEEDS_ALL                                                                       \
  "rank %d is not there, since one process stands for all ranks: run each of them with " \
  "tuner emulate --all-ranks"

struct communicator {
  struct file *file;     /* NULL for a single rank, and for one that stands for all */
  struct region *region; /* likewise */
  uint64_t offset;
  uint32_t rank, size;
  int device; /* as visible */
  uint64_t buffer_bytes; /* device memory that it holds */
  uint32_t round;      /* the last one that was finished */
  uint32_t generation; /* groups that were split off so far */
  int aborted;
  int error; /* ncclResult_t */
  char message[160];
  double factors[MOST_OWN_OPERATIONS]; /* of ncclRedOpCreatePreMulSum */
  int own_operations;
};

struct operation {
  enum kind kind;
  struct communicator *comm;
  const char *send;
  char *receive;
  size_t bytes; /* of one rank's share */
  int type, reduction;
  uint32_t root; /* or peer */
  size_t done;
  int posted, finished, carried;
  /* for a communicator that comes of it */
  uint64_t nonce;
  int32_t color, key;
  int32_t *choices; /* of all ranks: color and key */
  struct communicator **made;
  struct operation *next;
};

static struct region *region_of(const struct operation *o) { return o->comm->region; }

static int is_lane(const struct operation *o) { return o->kind == SEND || o->kind == RECEIVE; }

/* What each rank posts in all: the whole of what others may read from it. */
static size_t stream_bytes(const struct operation *o) {
  int for_each = o->kind == REDUCE_SCATTER || o->kind == ALL_TO_ALL || o->kind == SCATTER;
  return for_each ? o->bytes * o->comm->size : o->bytes;
}

static int gives(const struct operation *o) {
  return (o->kind != BROADCAST && o->kind != SCATTER) || o->comm->rank == o->root;
}

/* Whom this rank reads from: the root, everybody, or nobody. */
static int takes_from(const struct operation *o, uint32_t rank) {
  if (o->kind == BROADCAST || o->kind == SCATTER) return rank == o->root;
  if (o->kind == REDUCE || o->kind == GATHER) return o->comm->rank == o->root;
  return 1;
}

/* One chunk of the streams lies in the buffers; this rank takes its part of it. */
static void take(const struct operation *o, size_t bytes) {
  struct communicator *c = o->comm;
  const char *first = buffer_of(c->region, 0, c->round + 1);
  size_t stride = 2 * (size_t)BUFFER_BYTES, begin = o->done, end = o->done + bytes;
  if (o->kind == REDUCE_SCATTER || o->kind == ALL_TO_ALL || o->kind == SCATTER) {
    size_t own = o->bytes * c->rank; /* only what is meant for this rank */
    begin = begin < own ? own : begin;
    end = end > own + o->bytes ? own + o->bytes : end;
    if (begin >= end) return;
    first += begin - o->done;
    begin -= own;
    end -= own;
  }
  size_t n = end - begin;
  if (o->kind == REDUCE && c->rank != o->root) return;
  if (o->kind == ALL_REDUCE || o->kind == REDUCE || o->kind == REDUCE_SCATTER) {
    int own = o->reduction >= OPERATIONS;
    reduce(o->receive + begin, first, stride, c->size, n / type_bytes(o->type), o->type,
           own ? SUM : o->reduction, own ? c->factors[o->reduction - OPERATIONS] : 1.0);
    return;
  }
  for (uint32_t rank = 0; rank < c->size; rank++) {
    if (!takes_from(o, rank)) continue;
    int apart = o->kind != BROADCAST && o->kind != SCATTER;
    size_t place = apart ? rank * o->bytes : 0;
    copy_changed(o->receive + place + begin, first + rank * stride, n);
  }
}

/* One half of a round: post, or take. Returns whether anything was done. */
static int step_round(struct operation *o) {
  struct communicator *c = o->comm;
  struct region *r = c->region;
  size_t total = stream_bytes(o), left = total - o->done;
  size_t bytes = left < BUFFER_BYTES ? left : BUFFER_BYTES;
  uint32_t round = c->round + 1;
  if (!o->posted) {
    for (uint32_t rank = 0; rank < c->size; rank++) /* rounds are compared as they wrap around */
      if ((int32_t)(acquire(&r->members[rank].round) - (round - 1)) < 0) return 0;
    if (gives(o)) memcpy(buffer_of(r, c->rank, round), o->send + o->done, bytes);
    publish(r, &r->members[c->rank].round, round);
    o->posted = 1;
    return 1;
  }
  for (uint32_t rank = 0; rank < c->size; rank++)
    if (takes_from(o, rank) && (int32_t)(acquire(&r->members[rank].round) - round) < 0) return 0;
  take(o, bytes);
  c->round = round;
  o->posted = 0;
  o->done += bytes;
  o->finished = o->done == total;
  return 1;
}

static int step_lane(struct operation *o) {
  struct communicator *c = o->comm;
  int sends = o->kind == SEND;
  struct lane *lane = sends ? lane_of(c->region, c->rank, o->root)
                            : lane_of(c->region, o->root, c->rank);
  size_t left = o->bytes - o->done, bytes = left < SLOT_BYTES ? left : SLOT_BYTES;
  uint32_t posted = acquire(&lane->posted), taken = acquire(&lane->taken);
  if (sends ? posted - taken == LANE_SLOTS : posted == taken) return 0;
  if (sends) {
    memcpy(lane->slots[posted % LANE_SLOTS], o->send + o->done, bytes);
    publish(c->region, &lane->posted, posted + 1);
  } else {
    copy_changed(o->receive + o->done, lane->slots[taken % LANE_SLOTS], bytes);
    publish(c->region, &lane->taken, taken + 1);
  }
  o->done += bytes;
  o->finished = o->done == o->bytes;
  return 1;
}

/* -- communicators ------------------------------------------------------------------------------ */

static struct communicator *new_communicator(uint32_t size, uint32_t rank, int device) {
  struct communicator *c = calloc(1, sizeof *c);
  if (!c) return NULL;
  c->size = size;
  c->rank = rank;
  c->device = device;
  return c;
}

/* Takes over a reference to the file. */
static int enter_region(struct communicator *c, struct file *f, uint64_t parent,
                        uint32_t generation, int32_t color) {
  c->file = f;
  c->offset = region_offset(f, parent, generation, color, c->size);
  c->region = c->offset ? map_region(f, c->offset, c->size) : NULL;
  if (!c->region) return SYSTEM_ERROR;
  struct member *own = &c->region->members[c->rank];
  own->pid = (int32_t)getpid();
  publish(c->region, &own->attached, 1);
  return SUCCESS;
}

static void free_communicator(struct communicator *c) {
  if (c->region) leave_region(c->file, c->region, c->offset, c->rank);
  if (c->buffer_bytes) emu_give(emu_physical(c->device), c->buffer_bytes);
  close_file(c->file);
  free(c);
}

static int all_attached(const struct region *r) {
  for (uint32_t i = 0; i < r->size; i++)
    if (!acquire(&r->members[i].attached)) return 0;
  return 1;
}

/* Initialization ends when all ranks are there, as it does in the library. */
static int step_attach(struct operation *o) {
  if (!all_attached(region_of(o))) return 0;
  if (o->nonce) close_made(o->nonce);
  *o->made = o->comm;
  o->finished = 1;
  return 1;
}

/* All ranks have said their color and key: this rank's group is of its color, by key and rank. */
static int become_child(struct operation *o) {
  struct communicator *parent = o->comm;
  uint32_t size = 0, rank = 0;
  for (uint32_t i = 0; i < parent->size; i++) {
    int32_t color = o->choices[2 * i], key = o->choices[2 * i + 1];
    if (color != o->color) continue;
    size++;
    rank += key < o->key || (key == o->key && i < parent->rank);
  }
  uint32_t generation = ++parent->generation;
  *o->made = NULL;
  if (o->color < 0) return o->finished = 1, SUCCESS; /* NCCL_SPLIT_NOCOLOR */
  struct communicator *child = new_communicator(size, rank, parent->device);
  if (!child) return SYSTEM_ERROR;
  if (size == 1) return *o->made = child, o->finished = 1, SUCCESS;
  __atomic_add_fetch(&parent->file->references, 1, __ATOMIC_RELAXED);
  o->kind = ATTACH;
  o->comm = child;
  o->finished = 0;
  return enter_region(child, parent->file, parent->offset, generation, o->color);
}

/* -- groups ------------------------------------------------------------------------------------- */

/* Collectives of a communicator go in order, and so do sends and receives of a pair. */
static int waits_for_earlier(const struct operation *all, const struct operation *o) {
  for (const struct operation *e = all; e != o; e = e->next) {
    if (e->finished || e->comm != o->comm || is_lane(e) != is_lane(o)) continue;
    if (!is_lane(o) || (e->kind == o->kind && e->root == o->root)) return 1;
  }
  return 0;
}

static int fail(struct communicator *c, int error, const char *text, int rank) {
  snprintf(c->message, sizeof c->message, text, rank);
  snprintf(last_message, sizeof last_message, "%s", c->message);
  return c->error = error;
}

static int step(struct operation *o, int *moved) {
  if (o->comm->aborted) return fail(o->comm, INTERNAL_ERROR, "communicator was aborted", 0);
  if (o->kind == ATTACH)
    *moved |= step_attach(o);
  else if (is_lane(o))
    *moved |= step_lane(o);
  else
    *moved |= step_round(o);
  if (o->finished && o->kind == SPLIT) return become_child(o);
  return SUCCESS;
}

/* Steps all until all are finished; waits where no step is possible. A rank that has ended is an
 * error here, where the library would wait for it until its own or PyTorch's limit. */
static int run(struct operation *all) {
  int comms_differ = 0, missing;
  for (struct operation *o = all; o; o = o->next) comms_differ |= o->comm != all->comm;
  for (;;) {
    struct operation *waiting = NULL;
    int moved = 0, status;
    uint32_t seen = 0;
    for (struct operation *o = all; o; o = o->next) {
      if (o->finished) continue;
      if (!waiting) {
        waiting = o;
        seen = acquire(&region_of(o)->pulse);
      }
      if (!waits_for_earlier(all, o) && (status = step(o, &moved))) return status;
    }
    if (!waiting) return SUCCESS;
    if (moved) continue;
    missing = missing_rank(region_of(waiting));
    if (missing >= 0 && acquire(&region_of(waiting)->pulse) == seen)
      return fail(waiting->comm, REMOTE_ERROR,
                  "rank %d has ended or left the communicator while this rank waits for it",
                  missing);
    wait_for_change(region_of(waiting), seen, comms_differ ? 1 : 100);
  }
}

static __thread struct {
  int depth;
  struct operation *first, **last;
} group;

static void free_operations(struct operation *o) {
  while (o) {
    struct operation *next = o->next;
    free(o->choices);
    free(o);
    o = next;
  }
}

/* A send that gives what a receive of the same group gets; NULL if there is none. */
static struct operation *alike_send(struct operation *all, const struct operation *o, int to_self) {
  for (struct operation *s = all; s; s = s->next)
    if (s->comm == o->comm && s->kind == SEND && !s->posted && s->bytes == o->bytes &&
        (s->root == o->comm->rank) == to_self)
      return s;
  return NULL;
}

/* Sends and receives of a process that stands for all ranks. In a group that sends to every rank
 * (all-to-all) each sends to this one what it sends to itself; in a ring, what it sends to the next.
 * A receive for which nothing is sent, as in a pipeline, is of a rank that is not alike. */
static int exchange_alike(struct operation *all) {
  for (struct operation *o = all; o; o = o->next) {
    if (o->comm->region || !is_lane(o)) continue;
    o->finished = 1;
    if (o->kind == SEND) continue;
    struct operation *s = alike_send(all, o, 1);
    if (!s && (s = alike_send(all, o, 0))) s->posted = 1;
    if (!s) return fail(o->comm, INVALID_USAGE, NEEDS_ALL, (int)o->root);
    if (o->carried) copy_changed(o->receive, s->send, o->bytes);
  }
  return SUCCESS;
}

static int group_end(void) {
  if (group.depth == 0) return INVALID_USAGE;
  if (--group.depth) return SUCCESS;
  struct operation *all = group.first;
  group.first = NULL;
  int status = exchange_alike(all);
  if (!status && all) status = run(all);
  free_operations(all);
  return status;
}

static struct operation *add(enum kind kind, struct communicator *c) {
  struct operation *o = calloc(1, sizeof *o);
  if (!o) return NULL;
  o->kind = kind;
  o->comm = c;
  if (!group.first) group.last = &group.first;
  *group.last = o;
  group.last = &o->next;
  return o;
}

#endif
