/* The state of an emulated machine: memory with its accounts, unknown calls, launches, time. */
#define _GNU_SOURCE
#include "device.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MIB (1ull << 20)
#define GRANULE (2 * MIB) /* what the driver maps at least */
#define SMALL MIB         /* up to here cudaMalloc shares a granule between allocations */
#define ALIGNMENT 512     /* of what cudaMalloc returns (CUDA C++ Programming Guide, 256 at least) */

static void die(const char *what) {
  fprintf(stderr, "tuner's emulator: %s\n", what);
  fflush(stderr);
  _exit(3);
}

/* -- shared memory ---------------------------------------------------------------------------- */

static struct emu_shared *shared;
static pthread_mutex_t start_lock = PTHREAD_MUTEX_INITIALIZER;

static void load_shared(void) {
  const char *path = getenv("TUNER_EMULATOR");
  if (!path) die("TUNER_EMULATOR is not set: start programs with `tuner emulate`");
  int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) die("the session is over: its `tuner` process has ended");
  struct emu_shared *found =
      mmap(NULL, sizeof *found, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (found == MAP_FAILED) die("the session's memory cannot be mapped");
  if (found->config.magic != EMU_MAGIC || found->config.version != EMU_VERSION)
    die("the session is of another version of tuner");
  __atomic_store_n(&shared, found, __ATOMIC_RELEASE);
}

struct emu_shared *emu_shared(void) {
  struct emu_shared *found = __atomic_load_n(&shared, __ATOMIC_ACQUIRE);
  if (found) return found;
  pthread_mutex_lock(&start_lock);
  if (!shared) load_shared();
  pthread_mutex_unlock(&start_lock);
  return shared;
}

/* The lock holds the process id of its owner, so that one that was killed loses it. */
static void lock_shared(void) {
  struct emu_shared *all = emu_shared();
  int32_t me = getpid();
  for (unsigned turn = 1;; turn++) {
    int32_t owner = 0;
    if (__atomic_compare_exchange_n(&all->lock, &owner, me, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
      return;
    if (turn % 64 == 0) {
      if (owner != me && kill(owner, 0) != 0 && errno == ESRCH)
        __atomic_compare_exchange_n(&all->lock, &owner, 0, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
      sched_yield();
    }
  }
}

static void unlock_shared(void) { __atomic_store_n(&shared->lock, 0, __ATOMIC_RELEASE); }

/* -- accounts --------------------------------------------------------------------------------- */

/* Of this process, one a device; forgotten in a forked child, which holds nothing. */
static struct emu_account *mine[EMU_DEVICES];
static int first_device = -1;

static void after_fork(void) {
  memset(mine, 0, sizeof mine);
  first_device = -1;
}

static int is_alive(int32_t pid) {
  if (kill(pid, 0) != 0 && errno == ESRCH) return 0;
  /* One that ended and was not waited for yet holds no memory. */
  char path[32], text[512];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  ssize_t got = read(file, text, sizeof text - 1);
  close(file);
  if (got <= 0) return 0;
  text[got] = 0;
  const char *name_end = strrchr(text, ')');
  return !(name_end && (name_end[2] == 'Z' || name_end[2] == 'X'));
}

/* What a process held is free again when it has ended; its account stays, to be read. */
static void drop_dead(void) {
  for (int i = 0; i < EMU_ACCOUNTS; i++) {
    struct emu_account *one = &shared->accounts[i];
    if (one->used_bytes && one->pid != getpid() && !is_alive(one->pid)) one->used_bytes = 0;
  }
}

static uint64_t used_on(int device) {
  uint64_t sum = 0;
  for (int i = 0; i < EMU_ACCOUNTS; i++) {
    const struct emu_account *one = &shared->accounts[i];
    if (one->pid && one->device == device) sum += one->used_bytes;
  }
  return sum;
}

static int has_room(int device, uint64_t size) {
  uint64_t limit = shared->config.memory_bytes;
  if (used_on(device) + size <= limit) return 1;
  drop_dead();
  return used_on(device) + size <= limit;
}

/* With the lock held. */
static void set_running(int device, uint64_t used) {
  shared->devices[device].running_bytes = used;
  for (int i = 0; i < EMU_ACCOUNTS; i++) {
    struct emu_account *one = &shared->accounts[i];
    if (one->pid && one->device == device) one->at_running_bytes = one->used_bytes;
  }
}

/* With the lock held, after this process took memory: only then can there be a peak. */
static void note_peak(int device) {
  if (used_on(device) <= shared->devices[device].running_bytes) return;
  drop_dead();
  uint64_t used = used_on(device);
  if (used > shared->devices[device].running_bytes) set_running(device, used);
}

void emu_begin_attempt(void) {
  if (!shared) return;
  lock_shared();
  drop_dead();
  for (int device = 0; device < EMU_DEVICES; device++) {
    if (!mine[device]) continue;
    struct emu_device *all = &shared->devices[device];
    if (all->running_bytes > all->peak_bytes) {
      all->peak_bytes = all->running_bytes;
      for (int i = 0; i < EMU_ACCOUNTS; i++) {
        struct emu_account *one = &shared->accounts[i];
        if (one->pid && one->device == device) one->at_peak_bytes = one->at_running_bytes;
      }
    }
    set_running(device, used_on(device));
  }
  unlock_shared();
}

void emu_give_up_attempt(void) {
  if (!shared) return;
  lock_shared();
  for (int device = 0; device < EMU_DEVICES; device++) {
    if (!mine[device]) continue;
    struct emu_device *all = &shared->devices[device];
    if (all->running_bytes > all->given_up_bytes) all->given_up_bytes = all->running_bytes;
    set_running(device, 0);
  }
  unlock_shared();
}

static void read_command(char *out) {
  int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  ssize_t got = file < 0 ? 0 : read(file, out, EMU_NAME - 1);
  if (file >= 0) close(file);
  if (got < 0) got = 0;
  out[got] = 0;
  for (ssize_t i = 0; i + 1 < got; i++)
    if (!out[i]) out[i] = ' ';
}

static struct emu_account *open_account(int device) {
  static int watches_forks;
  for (int round = 0; round < 2; round++) {
    for (int i = 0; i < EMU_ACCOUNTS; i++) {
      struct emu_account *one = &shared->accounts[i];
      if (one->pid && (round == 0 || one->used_bytes)) continue;
      memset(one, 0, sizeof *one);
      one->device = device;
      one->pid = getpid();
      read_command(one->command);
      if (!watches_forks) {
        watches_forks = 1;
        pthread_atfork(NULL, NULL, after_fork);
      }
      return one;
    }
    drop_dead();
  }
  unlock_shared();
  die("more processes use emulated devices than it has accounts for");
  return NULL;
}

/* With the lock held. */
static struct emu_account *account_of(int device) {
  if (device < 0 || device >= EMU_DEVICES) {
    unlock_shared();
    die("a device was named that is not there");
  }
  if (!mine[device]) {
    mine[device] = open_account(device);
    if (first_device < 0) first_device = device;
    mine[device]->used_bytes = mine[device]->peak_bytes = shared->config.context_bytes;
    note_peak(device);
  }
  return mine[device];
}

void emu_touch(int device) {
  if (device >= 0 && device < EMU_DEVICES && mine[device]) return;
  emu_shared();
  lock_shared();
  account_of(device);
  unlock_shared();
}

int emu_is_touched(int device) { return device >= 0 && device < EMU_DEVICES && mine[device]; }

int emu_take(int device, size_t size) {
  emu_shared();
  lock_shared();
  struct emu_account *account = account_of(device);
  int ok = has_room(device, size);
  if (ok) {
    account->used_bytes += size;
    if (account->used_bytes > account->peak_bytes) account->peak_bytes = account->used_bytes;
    note_peak(device);
    /* An allocator that is refused gives back what it caches, and asks for the same once more. */
    if (size >= account->refused_bytes) account->refused_bytes = account->refused_ns = 0;
  } else {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    account->refused_bytes = size;
    account->refused_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
  }
  unlock_shared();
  return ok ? 0 : -1;
}

void emu_give(int device, size_t size) {
  if (!mine[device]) return; /* of a parent, before the fork */
  lock_shared();
  mine[device]->used_bytes -= size;
  unlock_shared();
}

void emu_memory_info(int device, size_t *free_bytes, size_t *total_bytes) {
  emu_touch(device);
  emu_memory_of(device, free_bytes, total_bytes);
}

void emu_memory_of(int device, size_t *free_bytes, size_t *total_bytes) {
  emu_shared();
  lock_shared();
  drop_dead();
  uint64_t used = used_on(device), total = shared->config.memory_bytes;
  unlock_shared();
  *total_bytes = total;
  *free_bytes = used > total ? 0 : total - used;
}

__attribute__((destructor)) static void leave(void) {
  if (!shared) return;
  for (int i = 0; i < EMU_DEVICES; i++) {
    if (!mine[i]) continue;
    mine[i]->launches = emu_launch_count();
    /* The device's memory is free again; the account's peaks stay to be read. */
    mine[i]->used_bytes = 0;
  }
}

/* -- addresses -------------------------------------------------------------------------------- */

/* One range of addresses for all devices of the process, in granules. Pages exist where something
 * is written: values of floats never are, but integers are computed in place. */

struct allocation {
  uint32_t first; /* granule */
  uint32_t granules;
  size_t size;
  int device;
  int live;
  struct small *smalls; /* of a shared granule */
};

struct small {
  size_t offset, size, stride;
  int live;
  struct small *next;
};

static pthread_mutex_t address_lock = PTHREAD_MUTEX_INITIALIZER;
static char *base;
static uint64_t granules, next_granule; /* what is below the next is free */
static uint32_t *owner_of;          /* granule -> number of its allocation, from 1 on */
static struct allocation *allocations; /* never moved */
static uint32_t allocation_count;
#define MOST_ALLOCATIONS (1u << 24)

struct hole {
  uint32_t first, granules;
  struct hole *next;
};
static struct hole *holes; /* by address */

static void *map_nothing(size_t size) {
  void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                 -1, 0);
  if (p == MAP_FAILED) return NULL;
  /* One written byte must not take two megabytes, and a core dump not the whole range. */
  madvise(p, size, MADV_NOHUGEPAGE);
  madvise(p, size, MADV_DONTDUMP);
  return p;
}

static void open_addresses(void) {
  if (base) return;
  for (uint64_t size = 32ull << 40; size >= 1ull << 38; size /= 2) {
    char *found = map_nothing(size);
    if (!found) continue;
    uint64_t skip = (GRANULE - (uintptr_t)found % GRANULE) % GRANULE;
    granules = (size - skip) / GRANULE;
    owner_of = map_nothing(granules * sizeof *owner_of);
    allocations = map_nothing((uint64_t)MOST_ALLOCATIONS * sizeof *allocations);
    if (!owner_of || !allocations) die("no addresses are left for device memory");
    base = found + skip;
    next_granule = granules;
    return;
  }
  die("no addresses are left for device memory (is there a limit on virtual memory: ulimit -v?)");
}

static uint64_t granules_of(size_t size) { return (size + GRANULE - 1) / GRANULE; }
static char *address_of(uint64_t granule) { return base + (uint64_t)granule * GRANULE; }

/* Addresses run downwards, as the driver's do; allocations of one granule fill areas of 32 MiB
 * upwards. PyTorch takes the lower of two free blocks of one size, so this order decides how far
 * its memory is fragmented: with rising addresses, runs on a T4 that reserved 4.127 and 7.553 GiB
 * came to 3.758 and 7.803. */
#define AREA 16 /* granules */
static uint32_t area_next, area_end;

static uint32_t take_below(uint64_t count, uint64_t alignment) {
  uint64_t lowest = next_granule;
  while (lowest >= count && (uintptr_t)address_of(lowest - count) % alignment) lowest--;
  if (lowest < count) return UINT32_MAX;
  next_granule = lowest - count;
  return next_granule;
}

/* From the highest hole with room, and there from its end. */
static uint32_t take_hole(uint64_t count, uint64_t alignment) {
  struct hole **found = NULL;
  for (struct hole **at = &holes; *at; at = &(*at)->next) {
    struct hole *one = *at;
    if (one->granules < count) continue;
    if ((uintptr_t)address_of(one->first + one->granules - count) % alignment) continue;
    found = at;
  }
  if (!found) return UINT32_MAX;
  struct hole *one = *found;
  one->granules -= count;
  uint32_t first = one->first + one->granules;
  if (!one->granules) {
    *found = one->next;
    free(one);
  }
  return first;
}

static uint32_t take_granules(uint64_t count, uint64_t alignment) {
  uint32_t first = take_hole(count, alignment);
  if (first != UINT32_MAX) return first;
  if (count > 1 || alignment > GRANULE) return take_below(count, alignment);
  if (area_next == area_end) {
    area_next = take_below(AREA, GRANULE);
    if (area_next == UINT32_MAX) return area_end = area_next;
    area_end = area_next + AREA;
  }
  return area_next++;
}

static void return_granules(uint32_t first, uint32_t count) {
  struct hole **at = &holes, *before = NULL;
  while (*at && (*at)->first < first) {
    before = *at;
    at = &(*at)->next;
  }
  if (before && before->first + before->granules == first) {
    before->granules += count;
  } else {
    struct hole *one = malloc(sizeof *one);
    if (!one) die("out of host memory");
    *one = (struct hole){first, count, *at};
    *at = before = one;
  }
  struct hole *after = before->next;
  if (after && before->first + before->granules == after->first) {
    before->granules += after->granules;
    before->next = after->next;
    free(after);
  }
}

static struct allocation *new_allocation(int device, size_t size, uint64_t alignment) {
  uint64_t count = granules_of(size);
  uint32_t first = take_granules(count, alignment);
  if (first == UINT32_MAX) return NULL;
  if (++allocation_count >= MOST_ALLOCATIONS) die("more allocations than can be counted");
  struct allocation *one = &allocations[allocation_count];
  *one = (struct allocation){first, count, size, device, 1, NULL};
  for (uint64_t i = 0; i < count; i++) owner_of[first + i] = allocation_count;
  return one;
}

static struct allocation *allocation_at(const void *p) {
  if (!base || (char *)p < address_of(next_granule) || (char *)p >= address_of(granules)) return NULL;
  uint32_t number = owner_of[((char *)p - base) / GRANULE];
  return number && allocations[number].live ? &allocations[number] : NULL;
}

static void forget(void *p, size_t size) { madvise(p, size, MADV_DONTNEED); }

static void end_allocation(struct allocation *one) {
  one->live = 0;
  forget(address_of(one->first), (size_t)one->granules * GRANULE);
  return_granules(one->first, one->granules);
}

/* A piece of a granule that is shared; the driver packs small allocations alike. */
static void *take_small(struct allocation *slab, size_t size) {
  size_t stride = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, at = 0;
  struct small **link = &slab->smalls;
  for (; *link; link = &(*link)->next) {
    if ((*link)->offset - at >= stride) break;
    at = (*link)->offset + (*link)->stride;
  }
  if (!*link && GRANULE - at < stride) return NULL;
  struct small *one = malloc(sizeof *one);
  if (!one) die("out of host memory");
  *one = (struct small){at, size, stride, 1, *link};
  *link = one;
  return address_of(slab->first) + at;
}

static struct allocation *slabs[EMU_DEVICES][4096];

static int alloc_small(int device, size_t size, void **address) {
  for (int i = 0; i < 4096; i++) {
    struct allocation *slab = slabs[device][i];
    if (!slab) {
      if (emu_take(device, GRANULE)) return -1;
      slab = slabs[device][i] = new_allocation(device, GRANULE, GRANULE);
      if (!slab) return -1;
    }
    if ((*address = take_small(slab, size))) return 0;
  }
  return -1;
}

static int free_small(struct allocation *slab, void *p) {
  size_t offset = (char *)p - address_of(slab->first);
  for (struct small **link = &slab->smalls; *link; link = &(*link)->next) {
    struct small *one = *link;
    if (one->offset != offset) continue;
    *link = one->next;
    free(one);
    if (slab->smalls) return 0;
    for (int i = 0; i < 4096; i++) {
      if (slabs[slab->device][i] != slab) continue;
      int last = i;
      while (last + 1 < 4096 && slabs[slab->device][last + 1]) last++;
      slabs[slab->device][i] = slabs[slab->device][last];
      slabs[slab->device][last] = NULL;
      break;
    }
    end_allocation(slab);
    emu_give(slab->device, GRANULE);
    return 0;
  }
  return -1;
}

static int is_slab(const struct allocation *one) {
  return one->smalls != NULL;
}

int emu_alloc(int device, size_t size, void **address) {
  *address = NULL;
  emu_touch(device);
  pthread_mutex_lock(&address_lock);
  open_addresses();
  int result = -1;
  if (size <= SMALL) {
    result = alloc_small(device, size ? size : 1, address);
  } else if (emu_take(device, granules_of(size) * GRANULE) == 0) {
    struct allocation *one = new_allocation(device, size, GRANULE);
    if (one) {
      *address = address_of(one->first);
      result = 0;
    } else {
      emu_give(device, granules_of(size) * GRANULE);
    }
  }
  pthread_mutex_unlock(&address_lock);
  return result;
}

int emu_free(void *address) {
  pthread_mutex_lock(&address_lock);
  struct allocation *one = allocation_at(address);
  int result = -1;
  if (one && is_slab(one)) {
    result = free_small(one, address);
  } else if (one && address_of(one->first) == address) {
    end_allocation(one);
    emu_give(one->device, (size_t)one->granules * GRANULE);
    result = 0;
  }
  pthread_mutex_unlock(&address_lock);
  return result;
}

static int small_range(struct allocation *slab, const void *p, void **start, size_t *size) {
  size_t offset = (char *)p - address_of(slab->first);
  for (struct small *one = slab->smalls; one; one = one->next) {
    if (offset < one->offset || offset >= one->offset + one->stride) continue;
    *start = address_of(slab->first) + one->offset;
    *size = one->size;
    return 0;
  }
  return -1;
}

int emu_range(const void *p, void **start, size_t *size, int *device) {
  pthread_mutex_lock(&address_lock);
  struct allocation *one = allocation_at(p);
  int result = -1;
  if (one) {
    *device = one->device;
    if (is_slab(one)) {
      result = small_range(one, p, start, size);
    } else {
      *start = address_of(one->first);
      *size = one->size;
      result = 0;
    }
  }
  pthread_mutex_unlock(&address_lock);
  return result;
}

void emu_device_range(char **start, size_t *size) {
  *size = base ? (granules - next_granule) * GRANULE : 0;
  *start = *size ? address_of(next_granule) : NULL;
}

int emu_is_device_pointer(const void *p) {
  return base && (char *)p >= base && (char *)p < base + granules * GRANULE;
}

void *emu_reserve(size_t size, size_t alignment) {
  pthread_mutex_lock(&address_lock);
  open_addresses();
  if (alignment < GRANULE) alignment = GRANULE;
  int device = emu_current_physical();
  struct allocation *one = new_allocation(device < 0 ? 0 : device, size, alignment);
  pthread_mutex_unlock(&address_lock);
  return one ? address_of(one->first) : NULL;
}

void emu_unreserve(void *p, size_t size) {
  (void)size;
  pthread_mutex_lock(&address_lock);
  struct allocation *one = allocation_at(p);
  if (one && address_of(one->first) == p) end_allocation(one);
  pthread_mutex_unlock(&address_lock);
}

void emu_forget_pages(void *p, size_t size) { forget(p, size); }

/* -- managed and pinned memory ---------------------------------------------------------------- */

struct host_block {
  void *address;
  size_t size;
  int managed;
  struct host_block *next;
};
static struct host_block *host_blocks;
static pthread_mutex_t host_lock = PTHREAD_MUTEX_INITIALIZER;

static void *map_host(size_t size, int managed) {
  size = (size + 4095) & ~(size_t)4095;
  if (!size) size = 4096;
  void *p = map_nothing(size);
  struct host_block *one = p ? malloc(sizeof *one) : NULL;
  if (!one) return NULL;
  pthread_mutex_lock(&host_lock);
  *one = (struct host_block){p, size, managed, host_blocks};
  host_blocks = one;
  pthread_mutex_unlock(&host_lock);
  if (!managed) emu_host_add(p, size);
  return p;
}

static struct host_block *find_host(const void *p) {
  for (struct host_block *one = host_blocks; one; one = one->next)
    if ((char *)p >= (char *)one->address && (char *)p < (char *)one->address + one->size)
      return one;
  return NULL;
}

static void book(size_t size, int managed, int sign) {
  int device = first_device < 0 ? emu_current_physical() : first_device;
  lock_shared();
  struct emu_account *account = account_of(device);
  if (managed) {
    account->managed_bytes += sign * (int64_t)size;
    if (account->managed_bytes > account->managed_peak_bytes)
      account->managed_peak_bytes = account->managed_bytes;
  } else {
    account->pinned_bytes += sign * (int64_t)size;
  }
  unlock_shared();
}

int emu_alloc_managed(int device, size_t size, void **address) {
  emu_touch(device);
  *address = map_host(size, 1);
  if (!*address) return -1;
  book(size, 1, +1);
  return 0;
}

int emu_host_kind(const void *p) {
  pthread_mutex_lock(&host_lock);
  struct host_block *one = find_host(p);
  int result = !one ? 0 : one->managed ? 3 : 1;
  pthread_mutex_unlock(&host_lock);
  return result;
}

void *emu_alloc_pinned(size_t size) {
  emu_shared();
  void *p = map_host(size, 0);
  if (p) book(size, 0, +1);
  return p;
}

/* Managed memory too: cudaFree takes both. */
int emu_free_pinned(void *p) {
  pthread_mutex_lock(&host_lock);
  for (struct host_block **link = &host_blocks; *link; link = &(*link)->next) {
    struct host_block *one = *link;
    if (one->address != p) continue;
    *link = one->next;
    pthread_mutex_unlock(&host_lock);
    emu_host_remove(one->address);
    munmap(one->address, one->size);
    book(one->size, one->managed, -1);
    free(one);
    return 0;
  }
  pthread_mutex_unlock(&host_lock);
  return -1;
}

/* -- which devices this process sees ---------------------------------------------------------- */

static int visible[EMU_DEVICES], visible_count = -1;
static __thread int current;

/* As the driver reads CUDA_VISIBLE_DEVICES: ordinals or beginnings of UUIDs, until the first that
 * is none (CUDA C++ Programming Guide, CUDA Environment Variables). */
static void read_visible(void) {
  int count = emu_config()->device_count, found = 0;
  const char *text = getenv("CUDA_VISIBLE_DEVICES");
  if (!text) {
    for (int i = 0; i < count; i++) visible[found++] = i;
  } else {
    while (*text && found < EMU_DEVICES) {
      char *end;
      if (strncmp(text, "GPU-", 4) == 0) text += strcspn(text, "-") + 1; /* GPU-000000NN-... */
      long one = strtol(text, &end, 10);
      if (end == text || one < 0 || one >= count) break;
      visible[found++] = one;
      text = end + strcspn(end, ",");
      if (*text == ',') text++;
    }
  }
  __atomic_store_n(&visible_count, found, __ATOMIC_RELEASE);
}

int emu_visible_count(void) {
  if (visible_count < 0) read_visible();
  return visible_count;
}

int emu_physical(int ordinal) {
  return ordinal >= 0 && ordinal < emu_visible_count() ? visible[ordinal] : -1;
}

int emu_current(void) { return current; }
void emu_set_current(int ordinal) { current = ordinal; }

/* -- attributes -------------------------------------------------------------------------------- */

/* The numbers of cudaDeviceAttr and CUdevice_attribute are the same. */
int emu_attribute(int attribute, int physical) {
  const struct emu_config *c = emu_config();
  switch (attribute) {
    case 1: case 2: case 3: return 1024;
    case 4: return 64;
    case 5: return 0x7fffffff;
    case 6: case 7: return 65535;
    case 8: return 48 << 10;
    case 9: return 65536;
    case 10: return 32;
    case 11: return 0x7fffffff;
    case 12: case 82: return 65536;
    case 13: return c->clock_khz;
    case 14: case 30: return 512;
    case 16: return c->multiprocessors;
    case 33: return physical + 1;
    case 36: return c->memory_clock_khz;
    case 37: return c->memory_bus_bits;
    case 38: return c->l2_bytes;
    case 39: return c->threads_per_multiprocessor;
    case 40: return 2;
    case 51: return 32;
    case 75: return c->capability_major;
    case 76: return c->capability_minor;
    case 81: return c->shared_per_multiprocessor_bytes;
    case 87: return 32;
    case 97: return c->shared_per_block_optin_bytes;
    case 106: return c->blocks_per_multiprocessor;
    case 111: return c->capability_major >= 8 ? 1024 : 0;
    case 120: return c->capability_major >= 9;
    case 15: case 19: case 31: case 41: case 78: case 79: case 80: case 83: case 88: case 89:
    case 90: case 95: case 99: case 102: /* virtual memory management */
    case 103: case 115: case 125: return 1;
    case 119: return 1; /* pools export file descriptors */
    default: return 0; /* everything else that can be asked: not supported */
  }
}
/* -- unknown calls ---------------------------------------------------------------------------- */

void emu_unknown(const char *name) {
  struct emu_shared *all = emu_shared();
  lock_shared();
  for (int i = 0; i < EMU_UNKNOWN; i++) {
    struct emu_unknown *one = &all->unknown[i];
    if (!one->name[0]) strncpy(one->name, name, EMU_NAME - 1);
    if (strncmp(one->name, name, EMU_NAME - 1) == 0) {
      one->calls++;
      break;
    }
  }
  unlock_shared();
}

/* Functions that are looked up by name need a body each, to be counted under their names. */
#define BODIES 256
static char looked_up[BODIES][EMU_NAME];
static int looked_up_count;

#define ROW(X, n) X(n##0) X(n##1) X(n##2) X(n##3) X(n##4) X(n##5) X(n##6) X(n##7) X(n##8) \
  X(n##9) X(n##a) X(n##b) X(n##c) X(n##d) X(n##e) X(n##f)
#define ALL(X) ROW(X, 0x0) ROW(X, 0x1) ROW(X, 0x2) ROW(X, 0x3) ROW(X, 0x4) ROW(X, 0x5) \
  ROW(X, 0x6) ROW(X, 0x7) ROW(X, 0x8) ROW(X, 0x9) ROW(X, 0xa) ROW(X, 0xb) ROW(X, 0xc) \
  ROW(X, 0xd) ROW(X, 0xe) ROW(X, 0xf)
#define BODY(n) \
  static int body_##n(void) { \
    emu_unknown(looked_up[n]); \
    return 0; \
  }
ALL(BODY)
#define NAME_OF(n) body_##n,
static int (*const bodies[BODIES])(void) = {ALL(NAME_OF)};

void *emu_unknown_function(const char *name) {
  pthread_mutex_lock(&start_lock);
  int i = 0;
  while (i < looked_up_count && strncmp(looked_up[i], name, EMU_NAME - 1)) i++;
  if (i == looked_up_count && i < BODIES - 1) {
    strncpy(looked_up[i], name, EMU_NAME - 1);
    looked_up_count++;
  } else if (i >= BODIES - 1) {
    i = BODIES - 1;
    strcpy(looked_up[i], "(more functions than can be named)");
  }
  pthread_mutex_unlock(&start_lock);
  return (void *)bodies[i];
}

/* -- launches and time ------------------------------------------------------------------------- */

#define RING (1u << 16)
static struct emu_launch ring[RING];
static uint64_t launch_count;

void emu_note_launch(const char *name, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                     unsigned by, unsigned bz) {
  uint64_t number = __atomic_fetch_add(&launch_count, 1, __ATOMIC_RELAXED);
  ring[number % RING] = (struct emu_launch){name, {gx, gy, gz}, {bx, by, bz}};
}

uint64_t emu_launch_count(void) { return __atomic_load_n(&launch_count, __ATOMIC_RELAXED); }

uint64_t emu_launches(uint64_t first, struct emu_launch *out, uint64_t most) {
  uint64_t end = emu_launch_count(), written = 0;
  if (end > RING && first < end - RING) first = end - RING;
  for (; first < end && written < most; first++) out[written++] = ring[first % RING];
  return written;
}

static double host_ns, device_ns;

void emu_work(double host, double device) {
  host_ns += host;
  if (device_ns < host_ns) device_ns = host_ns;
  device_ns += device;
}

double emu_device_now_ns(void) { return device_ns > host_ns ? device_ns : host_ns; }
double emu_host_now_ns(void) { return host_ns; }
void emu_synchronize(void) {
  if (host_ns < device_ns) host_ns = device_ns;
}
