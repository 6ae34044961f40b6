/* How processes of a session hand small values to each other (part of nccl.c).
 *
 * Most collectives move nothing: floating-point values are not computed, and nobody waits. What is
 * carried is what programs decide by: integers (object collectives are bytes; counts, sizes and
 * flags are integers) and small tensors of any type. Then, and only then, ranks wait for the ranks
 * that they read from.
 *
 * Where: an anonymous file (memfd) of the process that made the unique id. The id says which
 * process and which descriptor, and all ranks open it through /proc/PID/fd. It lives as long as a
 * process maps it, so nothing is left behind, however the programs end. Communicators that are
 * split off get a region of the same file.
 *
 * A region holds for each rank two buffers, used in turn, and a lane for each ordered pair of
 * ranks. Collectives go in rounds of one buffer. A rank that posts round k has read all of round
 * k-2, and may overwrite that buffer once all ranks have posted round k-1: so one look at the
 * counters of the others replaces a barrier, and a rank that only gives (the root of a broadcast)
 * goes on at once. Lanes are rings for send and receive.
 */
#ifndef TUNER_NCCL_EXCHANGE_H
#define TUNER_NCCL_EXCHANGE_H

enum {
  PAGE = 4096,
  BUFFER_BYTES = 256 << 10,
  LANE_SLOTS = 16,
  SLOT_BYTES = 16 << 10,
  MOST_REGIONS = 8192,
  MOST_RANKS = 1024
};

#define SEGMENT_MAGIC 0x4c43434e454e5554ull
#define FILE_NAME "tuner-nccl"

/* Regions are found by the region that they were split from (0: by the unique id itself). */
struct entry {
  uint64_t parent;
  uint32_t generation;
  int32_t color;
  uint64_t offset;
};

struct segment { /* at the beginning of the file */
  uint64_t magic, nonce, next;
  int32_t lock; /* the process that holds it, or 0 */
  uint32_t entries;
  struct entry directory[MOST_REGIONS];
};

struct member {
  int32_t pid;
  uint32_t round; /* the last one that was posted */
  uint32_t attached, left;
  uint32_t padding[12]; /* a cache line for each */
};

struct region {
  uint32_t size; /* ranks */
  uint32_t pulse; /* changes whenever anybody did something; what waits waits for it */
  uint32_t gone;
  uint32_t padding[13];
  struct member members[];
};

struct lane {
  uint32_t posted, taken;
  uint32_t padding[14];
  char slots[LANE_SLOTS][SLOT_BYTES];
};

/* The file, as this process sees it; communicators that came of one id share it. */
struct file {
  int descriptor;
  int references;
  struct segment *segment;
};

struct unique_id { /* the 128 bytes of ncclUniqueId */
  uint64_t magic, nonce;
  int32_t pid, descriptor;
  char rest[104];
};
_Static_assert(sizeof(struct unique_id) == 128, "ncclUniqueId has 128 bytes");

static size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static size_t head_bytes(size_t size) {
  return whole_pages(sizeof(struct region) + size * sizeof(struct member));
}

static size_t region_bytes(size_t size) {
  return head_bytes(size) + whole_pages(2 * size * BUFFER_BYTES) +
         whole_pages(size * size * sizeof(struct lane));
}

static char *buffer_of(struct region *r, uint32_t rank, uint32_t round) {
  return (char *)r + head_bytes(r->size) + (2 * (size_t)rank + (round & 1)) * BUFFER_BYTES;
}

static struct lane *lane_of(struct region *r, uint32_t from, uint32_t to) {
  char *lanes = (char *)r + head_bytes(r->size) + whole_pages(2 * (size_t)r->size * BUFFER_BYTES);
  return (struct lane *)lanes + (size_t)from * r->size + to;
}

/* Memory that holds the same already is not written: pages that were never touched stay so. */
static void copy_changed(void *to, const void *from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += PAGE) {
    size_t n = bytes - at < PAGE ? bytes - at : PAGE;
    if (memcmp((char *)to + at, (const char *)from + at, n))
      memcpy((char *)to + at, (const char *)from + at, n);
  }
}

/* -- waiting ------------------------------------------------------------------------------------ */

static uint32_t acquire(const uint32_t *counter) {
  return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}

static void publish(struct region *r, uint32_t *counter, uint32_t value) {
  __atomic_store_n(counter, value, __ATOMIC_RELEASE);
  __atomic_add_fetch(&r->pulse, 1, __ATOMIC_RELEASE);
  syscall(SYS_futex, &r->pulse, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void wait_for_change(struct region *r, uint32_t seen, long milliseconds) {
  struct timespec limit = {milliseconds / 1000, milliseconds % 1000 * 1000000};
  syscall(SYS_futex, &r->pulse, FUTEX_WAIT, seen, &limit, NULL, 0);
}

/* A process that has ended; its parent may not have asked for its end yet. */
static int is_gone(int32_t pid) {
  char path[40], text[512];
  if (pid <= 0) return 0;
  if (kill(pid, 0) != 0) return errno == ESRCH;
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  int descriptor = open(path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return errno == ENOENT;
  ssize_t n = read(descriptor, text, sizeof text - 1);
  close(descriptor);
  text[n > 0 ? n : 0] = 0;
  const char *name_end = strrchr(text, ')'); /* "pid (name) state ..." */
  return name_end && strlen(name_end) > 2 && (name_end[2] == 'Z' || name_end[2] == 'X');
}

/* A rank whose process has ended, or that left the communicator; -1 if all are there. */
static int missing_rank(const struct region *r) {
  for (uint32_t i = 0; i < r->size; i++)
    if (is_gone(r->members[i].pid) || acquire(&r->members[i].left)) return (int)i;
  return -1;
}

/* -- files and regions -------------------------------------------------------------------------- */

static struct file *file_from(int descriptor) {
  struct file *f = calloc(1, sizeof *f);
  if (!f) return NULL;
  f->descriptor = descriptor;
  f->references = 1;
  f->segment = mmap(NULL, whole_pages(sizeof *f->segment), PROT_READ | PROT_WRITE, MAP_SHARED,
                    descriptor, 0);
  if (f->segment != MAP_FAILED) return f;
  free(f);
  return NULL;
}

static void close_file(struct file *f) {
  if (!f || __atomic_sub_fetch(&f->references, 1, __ATOMIC_ACQ_REL)) return;
  munmap(f->segment, whole_pages(sizeof *f->segment));
  close(f->descriptor);
  free(f);
}

/* Files that ids of this process stand for: kept open until all ranks have opened them. */
static struct {
  uint64_t nonce;
  int descriptor;
} made[256];
static pthread_mutex_t made_lock = PTHREAD_MUTEX_INITIALIZER;

static void remember_made(uint64_t nonce, int descriptor) {
  pthread_mutex_lock(&made_lock);
  for (size_t i = 0; i < sizeof made / sizeof *made; i++)
    if (!made[i].nonce) {
      made[i].nonce = nonce;
      made[i].descriptor = descriptor;
      break;
    }
  pthread_mutex_unlock(&made_lock);
}

static void close_made(uint64_t nonce) {
  pthread_mutex_lock(&made_lock);
  for (size_t i = 0; i < sizeof made / sizeof *made; i++)
    if (made[i].nonce == nonce) {
      close(made[i].descriptor);
      made[i].nonce = 0;
    }
  pthread_mutex_unlock(&made_lock);
}

static int make_id(struct unique_id *id) {
  int descriptor = memfd_create(FILE_NAME, MFD_CLOEXEC);
  struct segment *s = MAP_FAILED;
  size_t bytes = whole_pages(sizeof *s);
  memset(id, 0, sizeof *id);
  if (descriptor < 0) return -1;
  if (ftruncate(descriptor, (off_t)bytes) == 0)
    s = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (s == MAP_FAILED || getrandom(&id->nonce, sizeof id->nonce, 0) != sizeof id->nonce) {
    close(descriptor);
    return -1;
  }
  id->magic = s->magic = SEGMENT_MAGIC;
  s->nonce = id->nonce |= 1;
  s->next = bytes;
  id->pid = getpid();
  id->descriptor = descriptor;
  munmap(s, bytes);
  remember_made(id->nonce, descriptor);
  return 0;
}

static struct file *open_id(const struct unique_id *id) {
  char path[64];
  if (id->magic != SEGMENT_MAGIC) return NULL;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", id->pid, id->descriptor);
  int descriptor = open(path, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return NULL;
  struct file *f = file_from(descriptor);
  if (f && f->segment->magic == SEGMENT_MAGIC && f->segment->nonce == id->nonce) return f;
  if (f)
    close_file(f);
  else
    close(descriptor);
  return NULL;
}

static void lock_segment(struct segment *s) {
  int32_t own = (int32_t)getpid();
  for (;;) {
    int32_t holder = 0;
    if (__atomic_compare_exchange_n(&s->lock, &holder, own, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
      return;
    if (is_gone(holder)) /* killed while it held the lock */
      __atomic_compare_exchange_n(&s->lock, &holder, 0, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    sched_yield();
  }
}

/* Where the region of a group of ranks lies: made by the first that asks. 0: no room. */
static uint64_t region_offset(struct file *f, uint64_t parent, uint32_t generation, int32_t color,
                              uint32_t size) {
  struct segment *s = f->segment;
  uint64_t offset = 0;
  lock_segment(s);
  for (uint32_t i = 0; i < s->entries && !offset; i++) {
    const struct entry *e = &s->directory[i];
    if (e->parent == parent && e->generation == generation && e->color == color)
      offset = e->offset;
  }
  if (!offset && s->entries < MOST_REGIONS &&
      ftruncate(f->descriptor, (off_t)(s->next + region_bytes(size))) == 0) {
    offset = s->next;
    s->next += region_bytes(size);
    s->directory[s->entries++] = (struct entry){parent, generation, color, offset};
  }
  __atomic_store_n(&s->lock, 0, __ATOMIC_RELEASE);
  return offset;
}

static struct region *map_region(struct file *f, uint64_t offset, uint32_t size) {
  struct region *r = mmap(NULL, region_bytes(size), PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_NORESERVE, f->descriptor, (off_t)offset);
  if (r == MAP_FAILED) return NULL;
  r->size = size; /* every rank writes the same */
  return r;
}

/* The last rank to leave gives the pages back to the system. */
static void leave_region(struct file *f, struct region *r, uint64_t offset, uint32_t rank) {
  size_t bytes = region_bytes(r->size);
  int last = __atomic_add_fetch(&r->gone, 1, __ATOMIC_ACQ_REL) == r->size;
  publish(r, &r->members[rank].left, 1);
  munmap(r, bytes);
  if (last)
    fallocate(f->descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset,
              (off_t)bytes);
}

#endif
