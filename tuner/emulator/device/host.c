/* The host memory of this process as it would be if the program ran for real.
 *
 * Much of the memory of tensors on the host is never written here: weights without values, copies
 * from the device, pinned memory. A real run writes it. So the bytes of large tensors on the host
 * (by c10's CPU allocator, whose two functions stand here before its own, as in modes.c), of pinned
 * blocks and of holes (inside/hollow.py) are counted as allocated, and all else as resident. Pages
 * of the emulated device are left out. What malloc keeps of freed memory that was never written is
 * not known: it counts as given back. */
#define _GNU_SOURCE
#include "device.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* c10::alloc_cpu(size_t) and c10::free_cpu(void *) */
#define ALLOC _ZN3c109alloc_cpuEm
#define FREE _ZN3c108free_cpuEPv
#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

#define LARGE (1 << 20)     /* smaller tensors are taken to be written here as they are for real */
#define REUSED (32u << 20)  /* glibc maps larger blocks anew (DEFAULT_MMAP_THRESHOLD_MAX) */
#define PAGE 4096
#define EVERY_NS 50000000ull /* the resident part is looked at this often */
#define RARER 20             /* and takes at most one part in so many of the time */

struct region {
  char *start;
  size_t size;
};

static struct region *regions;
static size_t region_count, region_room;
static int64_t live, rest, peak; /* rest: resident, and not of a region */
static int watched;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Bytes of written pages. A page that was only read is the kernel's page of zeros: it is present,
 * but not resident, and unlike others not this process's own (bits 63 and 56 of pagemap(5), which
 * has no page frames here). Pages shared with forks are neither, and are told by what is in them. */
static size_t resident(char *start, size_t size) {
  static const char zeros[PAGE];
  static uint64_t pages[32768];
  static int file = -1, owner;
  if (owner != getpid()) {
    if (file >= 0) close(file);
    file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    owner = getpid();
  }
  char *at = (char *)((uintptr_t)start & ~(uintptr_t)(PAGE - 1));
  size_t found = 0;
  while (file >= 0 && at < start + size) {
    size_t count = (start + size - at + PAGE - 1) / PAGE, most = sizeof pages / sizeof *pages;
    if (count > most) count = most;
    ssize_t got = pread(file, pages, count * sizeof *pages, (uintptr_t)at / PAGE * sizeof *pages);
    if (got != (ssize_t)(count * sizeof *pages)) break;
    for (size_t i = 0; i < count; i++)
      found += pages[i] >> 63 && (pages[i] >> 56 & 1 || memcmp(at + i * PAGE, zeros, PAGE) != 0);
    at += count * PAGE;
  }
  return found * PAGE;
}

/* Resident memory that is neither of a file nor shared (proc(5), statm). */
static int64_t anonymous(void) {
  char text[128];
  long long all, total, shared;
  int file = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  ssize_t size = read(file, text, sizeof text - 1);
  close(file);
  text[size > 0 ? size : 0] = 0;
  return sscanf(text, "%lld %lld %lld", &all, &total, &shared) == 3 ? (total - shared) * PAGE : 0;
}

static void note_peak(void) {
  if (rest + live > peak) peak = rest + live;
}

static void look(void) {
  char *device;
  size_t size;
  int64_t written = 0;
  emu_device_range(&device, &size);
  if (size) written = resident(device, size);
  for (size_t i = 0; i < region_count; i++) written += resident(regions[i].start, regions[i].size);
  rest = anonymous() - written;
  note_peak();
}

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static void *look_again(void *unused) {
  for (uint64_t wait = EVERY_NS;;) {
    nanosleep(&(struct timespec){wait / 1000000000, wait % 1000000000}, NULL);
    uint64_t start = now_ns();
    pthread_mutex_lock(&lock);
    look();
    pthread_mutex_unlock(&lock);
    wait = RARER * (now_ns() - start);
    if (wait < EVERY_NS) wait = EVERY_NS;
  }
  return NULL;
}

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }

void emu_host_add(void *start, size_t size) {
  pthread_mutex_lock(&lock);
  if (region_count == region_room) {
    size_t room = region_room ? 2 * region_room : 1024;
    struct region *more = realloc(regions, room * sizeof *more);
    if (more) regions = more, region_room = room;
  }
  if (region_count < region_room) {
    regions[region_count++] = (struct region){start, size};
    live += size;
    if (watched && size < REUSED) rest -= resident(start, size);
    note_peak();
  }
  pthread_mutex_unlock(&lock);
}

void emu_host_remove(void *start) {
  pthread_mutex_lock(&lock);
  for (size_t i = region_count; i-- > 0;) {
    if (regions[i].start != start) continue;
    live -= regions[i].size;
    regions[i] = regions[--region_count];
    break;
  }
  pthread_mutex_unlock(&lock);
}

/* Watch this process from now on. */
void emu_host_watch(void) {
  pthread_t thread;
  if (watched) return;
  watched = 1;
  pthread_atfork(before_fork, after_fork, after_fork);
  if (pthread_create(&thread, NULL, look_again, NULL) == 0) pthread_detach(thread);
}

/* The peak since the last call, in bytes. */
int64_t emu_host_peak(void) {
  pthread_mutex_lock(&lock);
  look();
  int64_t found = peak;
  peak = rest + live;
  pthread_mutex_unlock(&lock);
  return found;
}

static void *real(const char *name) {
  void *c10 = dlopen("libc10.so", RTLD_NOW | RTLD_NOLOAD);
  return c10 ? dlsym(c10, name) : NULL;
}

EMU_EXPORT void *ALLOC(size_t size) {
  static void *(*alloc)(size_t);
  if (!alloc) alloc = (void *(*)(size_t))real(TEXT(ALLOC));
  void *found = alloc(size); /* or an exception of C++, which passes through */
  if (found && size >= LARGE) emu_host_add(found, size);
  return found;
}

EMU_EXPORT void FREE(void *start) {
  static void (*give_back)(void *);
  if (!give_back) give_back = (void (*)(void *))real(TEXT(FREE));
  if (start && malloc_usable_size(start) >= LARGE) emu_host_remove(start);
  give_back(start);
}
