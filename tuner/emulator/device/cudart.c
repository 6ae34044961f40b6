/* Stands in for libcudart (CUDA runtime API) of CUDA 12 and 13; CUDA_MAJOR says which.
 *
 * Memory calls keep accounts, copies of what is small are made, launches are noted and do
 * nothing. Layouts are those of the toolkits' driver_types.h; enumerations are written as ints.
 */
#define _GNU_SOURCE
#include "device.h"
#include "fatbinary.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef CUDA_MAJOR
#error "CUDA_MAJOR is 12 or 13"
#endif

#define API EMU_EXPORT

enum {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_DEVICE = 101,
  NO_DEVICE = 100,
  INVALID_HANDLE = 400,
  NO_IMAGE = 209,
  NOT_READY = 600,
  NOT_SUPPORTED = 801,
};

#define KEPT (1u << 20) /* fills up to here are made; larger ones are of floats and dropped */

static __thread int last_error;

static int fail(int error) {
  last_error = error;
  return error;
}

/* -- errors ------------------------------------------------------------------------------------ */

static const struct {
  int code;
  const char *name, *text;
} errors[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {209, "cudaErrorNoKernelImageForDevice", "no kernel image is available for execution on the device"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {600, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {704, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {801, "cudaErrorNotSupported", "operation not supported"},
};

static int error_index(int code) {
  for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == code) return i;
  return -1;
}

API const char *cudaGetErrorName(int code) {
  int i = error_index(code);
  return i < 0 ? "cudaErrorUnknown" : errors[i].name;
}
API const char *cudaGetErrorString(int code) {
  int i = error_index(code);
  return i < 0 ? "unknown error" : errors[i].text;
}
API int cudaGetLastError(void) {
  int error = last_error;
  last_error = OK;
  return error;
}
API int cudaPeekAtLastError(void) { return last_error; }

/* -- devices ----------------------------------------------------------------------------------- */

static int version(void) { return CUDA_MAJOR * 1000; }

API int cudaDriverGetVersion(int *v) { *v = 13000; return OK; }
API int cudaRuntimeGetVersion(int *v) { *v = version() + (CUDA_MAJOR == 12 ? 80 : 0); return OK; }
API int cudaGetDeviceCount(int *count) {
  *count = emu_visible_count();
  return *count ? OK : fail(NO_DEVICE);
}
API int cudaGetDevice(int *device) { *device = emu_current(); return OK; }
API int cudaSetDevice(int device) {
  if (emu_physical(device) < 0) return fail(INVALID_DEVICE);
  emu_set_current(device);
  return OK;
}
API int cudaInitDevice(int device, unsigned a, unsigned b) { (void)a; (void)b; return emu_physical(device) < 0 ? fail(INVALID_DEVICE) : OK; }
API int cudaChooseDevice(int *device, const void *p) { (void)p; *device = 0; return OK; }
API int cudaSetDeviceFlags(unsigned f) { (void)f; return OK; }
API int cudaGetDeviceFlags(unsigned *f) { *f = 0; return OK; }
API int cudaDeviceReset(void) { return OK; }
API int cudaDeviceSynchronize(void) { emu_synchronize(); return OK; }
API int cudaDeviceSetCacheConfig(int c) { (void)c; return OK; }
API int cudaDeviceSetLimit(int limit, size_t value) { (void)limit; (void)value; return OK; }
API int cudaDeviceGetLimit(size_t *value, int limit) { (void)limit; *value = 1024; return OK; }
API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return OK;
}
API int cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = a != b; return OK; }
API int cudaDeviceEnablePeerAccess(int peer, unsigned flags) { (void)peer; (void)flags; return OK; }
API int cudaDeviceDisablePeerAccess(int peer) { (void)peer; return OK; }
API int cudaDeviceGetP2PAttribute(int *v, int a, int b, int c) { (void)a; (void)b; (void)c; *v = 1; return OK; }
API int cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", emu_physical(device) + 1);
  return OK;
}
API int cudaDeviceGetByPCIBusId(int *device, const char *text) {
  unsigned domain, bus;
  if (sscanf(text, "%x:%x", &domain, &bus) != 2) return fail(INVALID_VALUE);
  for (int i = 0; i < emu_visible_count(); i++)
    if (emu_physical(i) == (int)bus - 1) return *device = i, OK;
  return fail(INVALID_DEVICE);
}

/* cudaDeviceProp, driver_types.h. The sizes of textures and surfaces are nobody's concern here. */
struct properties {
  char name[256];
  unsigned char uuid[16];
  char luid[8];
  unsigned luid_mask;
  size_t total_memory, shared_per_block;
  int registers_per_block, warp_size;
  size_t pitch;
  int threads_per_block, block_size[3], grid_size[3];
#if CUDA_MAJOR < 13
  int clock_khz;
#endif
  size_t constant_memory;
  int major, minor;
  size_t texture_alignment, texture_pitch;
#if CUDA_MAJOR < 13
  int device_overlap;
#endif
  int multiprocessors;
#if CUDA_MAJOR < 13
  int kernel_timeout;
#endif
  int integrated, can_map_host;
#if CUDA_MAJOR < 13
  int compute_mode;
  int textures_and_surfaces[40];
#else
  int textures_and_surfaces[39];
#endif
  size_t surface_alignment;
  int concurrent_kernels, ecc, pci_bus, pci_device, pci_domain, tcc, async_engines, unified;
#if CUDA_MAJOR < 13
  int memory_clock_khz;
#endif
  int memory_bus_bits, l2_bytes, persisting_l2_bytes, threads_per_multiprocessor;
  int stream_priorities, global_l1, local_l1;
  size_t shared_per_multiprocessor;
  int registers_per_multiprocessor, managed, multi_board, board_group, host_atomics;
#if CUDA_MAJOR < 13
  int single_to_double;
#endif
  int pageable, concurrent_managed;
#if CUDA_MAJOR < 13
  int preemption, host_pointer_registered, cooperative, cooperative_multi;
#else
  int preemption, host_pointer_registered, cooperative;
#endif
  size_t shared_optin;
  int pageable_tables, direct_managed, blocks_per_multiprocessor, policy_window;
  size_t shared_reserved;
  int host_register, sparse_arrays, host_register_readonly, timeline_semaphores, pools, rdma;
  unsigned rdma_flush;
  int rdma_ordering;
  unsigned pool_handles;
  int deferred_arrays, ipc_events, cluster_launch, unified_functions;
#if CUDA_MAJOR < 13
  int reserved[63];
#else
  int numa[4];
  unsigned pci_ids[2];
  int host_numa_ipc, reserved[56];
#endif
};

static void fill_properties(struct properties *p, int physical) {
  const struct emu_config *c = emu_config();
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", c->name);
  p->uuid[3] = physical; /* as NVML's UUID has it: GPU-000000NN-... */
  p->total_memory = c->memory_bytes;
  p->shared_per_block = 48 << 10;
  p->registers_per_block = p->registers_per_multiprocessor = 65536;
  p->warp_size = 32;
  p->pitch = 0x7fffffff;
  p->threads_per_block = 1024;
  p->block_size[0] = p->block_size[1] = 1024;
  p->block_size[2] = 64;
  p->grid_size[0] = 0x7fffffff;
  p->grid_size[1] = p->grid_size[2] = 65535;
  p->constant_memory = 65536;
  p->major = c->capability_major;
  p->minor = c->capability_minor;
  p->texture_alignment = p->surface_alignment = 512;
  p->texture_pitch = 32;
  p->multiprocessors = c->multiprocessors;
  p->can_map_host = p->concurrent_kernels = p->unified = 1;
  p->pci_bus = physical + 1;
  p->async_engines = 2;
#if CUDA_MAJOR < 13
  p->clock_khz = c->clock_khz;
  p->memory_clock_khz = c->memory_clock_khz;
  p->device_overlap = 1;
#endif
  p->memory_bus_bits = c->memory_bus_bits;
  p->l2_bytes = c->l2_bytes;
  p->threads_per_multiprocessor = c->threads_per_multiprocessor;
  p->stream_priorities = p->global_l1 = p->local_l1 = 1;
  p->shared_per_multiprocessor = c->shared_per_multiprocessor_bytes;
  p->managed = p->concurrent_managed = p->pageable = p->preemption = p->cooperative = 1;
  p->shared_optin = c->shared_per_block_optin_bytes;
  p->shared_reserved = c->capability_major >= 8 ? 1024 : 0;
  p->blocks_per_multiprocessor = c->blocks_per_multiprocessor;
  p->host_register = p->pools = p->ipc_events = 1;
  p->cluster_launch = c->capability_major >= 9;
}

static int get_properties(struct properties *p, int device) {
  int physical = emu_physical(device);
  if (physical < 0) return fail(INVALID_DEVICE);
  fill_properties(p, physical);
  return OK;
}
#if CUDA_MAJOR < 13
API int cudaGetDeviceProperties_v2(struct properties *p, int device) { return get_properties(p, device); }
#else
API int cudaGetDeviceProperties(struct properties *p, int device) { return get_properties(p, device); }
#endif

API int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  int physical = emu_physical(device);
  if (physical < 0) return fail(INVALID_DEVICE);
  *value = emu_attribute(attribute, physical);
  return OK;
}

/* -- memory ------------------------------------------------------------------------------------ */

static int allocate(void **p, size_t size) {
  if (!size) return *p = NULL, OK;
  return emu_alloc(emu_current_physical(), size, p) ? fail(OUT_OF_MEMORY) : OK;
}
API int cudaMalloc(void **p, size_t size) { return allocate(p, size); }
API int cudaFree(void *p) {
  emu_touch(emu_current_physical());
  if (!p || emu_free(p) == 0 || emu_free_pinned(p) == 0) return OK;
  return fail(INVALID_VALUE);
}
API int cudaMallocPitch(void **p, size_t *pitch, size_t width, size_t height) {
  *pitch = (width + 511) & ~(size_t)511;
  return allocate(p, *pitch * height);
}
API int cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  emu_memory_info(emu_current_physical(), free_bytes, total);
  return OK;
}
API int cudaMallocManaged(void **p, size_t size, unsigned flags) {
  (void)flags;
  return emu_alloc_managed(emu_current_physical(), size, p) ? fail(OUT_OF_MEMORY) : OK;
}
API int cudaHostAlloc(void **p, size_t size, unsigned flags) {
  (void)flags;
  *p = emu_alloc_pinned(size);
  return *p ? OK : fail(OUT_OF_MEMORY);
}
API int cudaMallocHost(void **p, size_t size) { return cudaHostAlloc(p, size, 0); }
API int cudaFreeHost(void *p) { return !p || emu_free_pinned(p) == 0 ? OK : fail(INVALID_VALUE); }
API int cudaHostRegister(void *p, size_t size, unsigned f) { (void)p; (void)size; (void)f; return OK; }
API int cudaHostUnregister(void *p) { (void)p; return OK; }
API int cudaHostGetDevicePointer(void **device, void *host, unsigned f) { (void)f; *device = host; return OK; }
API int cudaHostGetFlags(unsigned *flags, void *p) { (void)p; *flags = 0; return OK; }
API int cudaMemAdvise(const void *p, size_t n, int a, ...) { (void)p; (void)n; (void)a; return OK; }
API int cudaMemPrefetchAsync(const void *p, size_t n, ...) { (void)p; (void)n; return OK; }

/* cudaPointerAttributes, driver_types.h */
struct pointer_attributes {
  int type, device;
  void *device_pointer, *host_pointer;
#if CUDA_MAJOR >= 13
  long reserved[8];
#endif
};
static int visible_ordinal(int physical) {
  for (int i = 0; i < emu_visible_count(); i++)
    if (emu_physical(i) == physical) return i;
  return 0;
}
API int cudaPointerGetAttributes(struct pointer_attributes *a, const void *p) {
  void *start;
  size_t size;
  int device;
  memset(a, 0, sizeof *a);
  if (emu_range(p, &start, &size, &device) == 0) {
    a->type = 2;
    a->device = visible_ordinal(device);
    a->device_pointer = (void *)p;
  } else if ((a->type = emu_host_kind(p))) {
    a->device = emu_current();
    a->device_pointer = a->host_pointer = (void *)p;
  } else {
    a->device = -2;
    a->host_pointer = (void *)p;
  }
  return OK;
}

static int copy(void *to, const void *from, size_t size) {
  return emu_copy(to, from, size) ? fail(NOT_SUPPORTED) : OK;
}
API int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
  (void)kind; (void)stream;
  return copy(to, from, size);
}
API int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
  emu_synchronize();
  return cudaMemcpyAsync(to, from, size, kind, NULL);
}
API int cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t size, void *stream) {
  (void)a; (void)b; (void)stream;
  return copy(to, from, size);
}
API int cudaMemcpyPeer(void *to, int a, const void *from, int b, size_t size) {
  return cudaMemcpyPeerAsync(to, a, from, b, size, NULL);
}
API int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                          size_t width, size_t height, int kind, void *stream) {
  (void)kind; (void)stream;
  return emu_copy_rows(to, to_pitch, from, from_pitch, width, height) ? fail(NOT_SUPPORTED) : OK;
}
API int cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                     size_t height, int kind) {
  return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, NULL);
}
API int cudaMemcpyBatchAsync(void **to, void **from, size_t *sizes, size_t count, ...) {
  int result = OK;
  for (size_t i = 0; i < count && result == OK; i++) result = copy(to[i], from[i], sizes[i]);
  return result;
}

/* Zeros need no page: whole ones are given back instead. */
API int cudaMemsetAsync(void *p, int value, size_t size, void *stream) {
  (void)stream;
  if (size <= KEPT || !emu_is_device_pointer(p)) {
    memset(p, value, size);
  } else if (value == 0) {
    char *from = (char *)(((uintptr_t)p + 4095) & ~(uintptr_t)4095);
    char *to = (char *)(((uintptr_t)p + size) & ~(uintptr_t)4095);
    memset(p, 0, from - (char *)p);
    emu_forget_pages(from, to - from);
    memset(to, 0, (char *)p + size - to);
  }
  return OK;
}
API int cudaMemset(void *p, int value, size_t size) { return cudaMemsetAsync(p, value, size, NULL); }
API int cudaMemset2DAsync(void *p, size_t pitch, int value, size_t width, size_t height, void *s) {
  for (size_t row = 0; row < height; row++) cudaMemsetAsync((char *)p + row * pitch, value, width, s);
  return OK;
}

/* -- stream-ordered allocation ------------------------------------------------------------------ */

/* One pool a device. It keeps what is freed, as PyTorch asks of it (no release threshold), and
 * gives it to the next allocation that it is large enough for. How the driver's pool rounds is not
 * documented: blocks of 2 MiB granules are assumed. */
struct pooled {
  void *address;
  size_t size, granted;
  int free;
  struct pooled *next;
};
static struct pool {
  struct pooled *blocks;
  uint64_t used, used_high, reserved, reserved_high, threshold;
} pools[EMU_DEVICES];
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;

static struct pooled *pool_find(struct pool *pool, size_t size) {
  struct pooled *best = NULL;
  for (struct pooled *one = pool->blocks; one; one = one->next)
    if (one->free && one->granted >= size && (!best || one->granted < best->granted)) best = one;
  return best;
}
static struct pooled *pool_grow(struct pool *pool, int device, size_t size) {
  void *address;
  if (emu_alloc(device, size > (1u << 20) ? size : (2u << 20), &address)) return NULL;
  struct pooled *one = malloc(sizeof *one);
  if (!one) return NULL;
  size_t granted = (size + (2u << 20) - 1) & ~(size_t)((2u << 20) - 1);
  *one = (struct pooled){address, size, granted, 1, pool->blocks};
  pool->blocks = one;
  pool->reserved += granted;
  if (pool->reserved > pool->reserved_high) pool->reserved_high = pool->reserved;
  return one;
}
API int cudaMallocAsync(void **p, size_t size, void *stream) {
  (void)stream;
  int device = emu_current_physical();
  struct pool *pool = &pools[device];
  pthread_mutex_lock(&pool_lock);
  struct pooled *one = pool_find(pool, size);
  if (!one) one = pool_grow(pool, device, size);
  if (one) {
    one->free = 0;
    one->size = size;
    pool->used += size;
    if (pool->used > pool->used_high) pool->used_high = pool->used;
  }
  pthread_mutex_unlock(&pool_lock);
  *p = one ? one->address : NULL;
  return one ? OK : fail(OUT_OF_MEMORY);
}
API int cudaMallocFromPoolAsync(void **p, size_t size, void *pool, void *stream) {
  (void)pool;
  return cudaMallocAsync(p, size, stream);
}
API int cudaFreeAsync(void *p, void *stream) {
  (void)stream;
  pthread_mutex_lock(&pool_lock);
  for (int device = 0; device < EMU_DEVICES; device++)
    for (struct pooled *one = pools[device].blocks; one; one = one->next)
      if (one->address == p && !one->free) {
        one->free = 1;
        pools[device].used -= one->size;
        pthread_mutex_unlock(&pool_lock);
        return OK;
      }
  pthread_mutex_unlock(&pool_lock);
  return cudaFree(p);
}
API int cudaDeviceGetDefaultMemPool(void **pool, int device) {
  int physical = emu_physical(device);
  if (physical < 0) return fail(INVALID_DEVICE);
  *pool = &pools[physical];
  return OK;
}
API int cudaDeviceGetMemPool(void **pool, int device) { return cudaDeviceGetDefaultMemPool(pool, device); }
API int cudaDeviceSetMemPool(int device, void *pool) { (void)device; (void)pool; return OK; }
API int cudaMemPoolTrimTo(void *handle, size_t keep) {
  struct pool *pool = handle;
  pthread_mutex_lock(&pool_lock);
  for (struct pooled **link = &pool->blocks; *link;) {
    struct pooled *one = *link;
    if (!one->free || pool->reserved <= keep) {
      link = &one->next;
      continue;
    }
    *link = one->next;
    pool->reserved -= one->granted;
    emu_free(one->address);
    free(one);
  }
  pthread_mutex_unlock(&pool_lock);
  return OK;
}
API int cudaMemPoolSetAttribute(void *pool, int attribute, void *value) {
  struct pool *one = pool;
  if (attribute == 4) one->threshold = *(uint64_t *)value;
  if (attribute == 6) one->reserved_high = one->reserved;
  if (attribute == 8) one->used_high = one->used;
  return OK;
}
API int cudaMemPoolGetAttribute(void *pool, int attribute, void *value) {
  const struct pool *one = pool;
  switch (attribute) {
    case 1: case 2: case 3: *(int *)value = 1; return OK;
    case 4: *(uint64_t *)value = one->threshold; return OK;
    case 5: *(uint64_t *)value = one->reserved; return OK;
    case 6: *(uint64_t *)value = one->reserved_high; return OK;
    case 7: *(uint64_t *)value = one->used; return OK;
    case 8: *(uint64_t *)value = one->used_high; return OK;
    default: return fail(INVALID_VALUE);
  }
}
API int cudaMemPoolSetAccess(void *pool, const void *d, size_t n) { (void)pool; (void)d; (void)n; return OK; }

/* -- sharing between processes ------------------------------------------------------------------ */

/* A handle names addresses; whoever opens it gets addresses of the same size, and no memory is
 * charged twice. What is written on one side is not seen on the other. */
struct ipc_handle {
  size_t size;
  char rest[56];
};
API int cudaIpcGetMemHandle(struct ipc_handle *handle, void *p) {
  void *start;
  int device;
  memset(handle, 0, sizeof *handle);
  return emu_range(p, &start, &handle->size, &device) ? fail(INVALID_VALUE) : OK;
}
API int cudaIpcOpenMemHandle(void **p, struct ipc_handle handle, unsigned flags) {
  (void)flags;
  *p = emu_reserve(handle.size, 0);
  return *p ? OK : fail(OUT_OF_MEMORY);
}
API int cudaIpcCloseMemHandle(void *p) { emu_unreserve(p, 0); return OK; }
API int cudaIpcGetEventHandle(void *handle, void *event) { (void)event; memset(handle, 0, 64); return OK; }

/* -- streams and events -------------------------------------------------------------------------- */

struct stream {
  int priority;
  unsigned flags;
  unsigned long long capture; /* number of the capture that runs, 0 without one */
};
static struct stream default_stream;
static unsigned long long capture_count;

static struct stream *stream_of(void *p) {
  return (uintptr_t)p <= 2 ? &default_stream : p; /* the legacy and per-thread streams */
}
API int cudaStreamCreateWithPriority(void **s, unsigned flags, int priority) {
  struct stream *one = calloc(1, sizeof *one);
  if (!one) return fail(OUT_OF_MEMORY);
  emu_touch(emu_current_physical());
  one->priority = priority;
  one->flags = flags;
  *s = one;
  return OK;
}
API int cudaStreamCreateWithFlags(void **s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
API int cudaStreamCreate(void **s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API int cudaStreamDestroy(void *s) { if ((uintptr_t)s > 2) free(s); return OK; }
API int cudaStreamGetPriority(void *s, int *p) { *p = stream_of(s)->priority; return OK; }
API int cudaStreamGetFlags(void *s, unsigned *f) { *f = stream_of(s)->flags; return OK; }
API int cudaStreamGetId(void *s, unsigned long long *id) { *id = (uintptr_t)s; return OK; }
API int cudaStreamGetDevice(void *s, int *d) { (void)s; *d = emu_current(); return OK; }
API int cudaStreamQuery(void *s) { (void)s; return OK; }
API int cudaStreamSynchronize(void *s) { (void)s; emu_synchronize(); return OK; }
API int cudaStreamWaitEvent(void *s, void *e, unsigned f) { (void)s; (void)e; (void)f; return OK; }
API int cudaStreamAttachMemAsync(void *s, void *p, size_t n, unsigned f) { (void)s; (void)p; (void)n; (void)f; return OK; }
API int cudaLaunchHostFunc(void *s, void (*function)(void *), void *data) { (void)s; function(data); return OK; }
API int cudaStreamAddCallback(void *s, void (*callback)(void *, int, void *), void *data, unsigned f) {
  (void)f;
  callback(s, OK, data);
  return OK;
}
API int cudaCtxResetPersistingL2Cache(void) { return OK; }

struct event {
  double at_ns;
  int recorded;
};
API int cudaEventCreateWithFlags(void **e, unsigned flags) {
  (void)flags;
  *e = calloc(1, sizeof(struct event));
  return *e ? OK : fail(OUT_OF_MEMORY);
}
API int cudaEventCreate(void **e) { return cudaEventCreateWithFlags(e, 0); }
API int cudaIpcOpenEventHandle(void **e, ...) { return cudaEventCreateWithFlags(e, 0); }
API int cudaEventDestroy(void *e) { free(e); return OK; }
API int cudaEventRecord(void *e, void *s) {
  (void)s;
  struct event *one = e;
  one->at_ns = emu_device_now_ns();
  one->recorded = 1;
  return OK;
}
API int cudaEventRecordWithFlags(void *e, void *s, unsigned f) { (void)f; return cudaEventRecord(e, s); }
API int cudaEventQuery(void *e) { (void)e; return OK; }
API int cudaEventSynchronize(void *e) { (void)e; emu_synchronize(); return OK; }
API int cudaEventElapsedTime(float *ms, void *from, void *to) {
  const struct event *a = from, *b = to;
  if (!a->recorded || !b->recorded) return fail(INVALID_HANDLE);
  *ms = (b->at_ns - a->at_ns) / 1e6;
  return OK;
}
API int cudaEventElapsedTime_v2(float *ms, void *from, void *to) { return cudaEventElapsedTime(ms, from, to); }

/* -- graphs: captured launches do nothing, and neither does their replay -------------------------- */

struct graph { int nodes; };

API int cudaStreamBeginCapture(void *s, int mode) {
  (void)mode;
  stream_of(s)->capture = ++capture_count;
  return OK;
}
API int cudaStreamBeginCaptureToGraph(void *s, ...) { return cudaStreamBeginCapture(s, 0); }
static struct graph any_graph;
API int cudaStreamEndCapture(void *s, void **graph) {
  stream_of(s)->capture = 0;
  *graph = &any_graph;
  return OK;
}
API int cudaStreamIsCapturing(void *s, int *status) { *status = stream_of(s)->capture ? 1 : 0; return OK; }
static int capture_info(void *s, int *status, unsigned long long *id, void **graph, void **dependencies,
                        size_t *count) {
  *status = stream_of(s)->capture ? 1 : 0;
  if (id) *id = stream_of(s)->capture;
  if (graph) *graph = &any_graph;
  if (dependencies) *dependencies = NULL;
  if (count) *count = 0;
  return OK;
}
#if CUDA_MAJOR < 13
API int cudaStreamGetCaptureInfo_v2(void *s, int *status, unsigned long long *id, void **graph,
                                    void **dependencies, size_t *count) {
  return capture_info(s, status, id, graph, dependencies, count);
}
API int cudaStreamGetCaptureInfo_v3(void *s, int *status, unsigned long long *id, void **graph,
                                    void **dependencies, void **edges, size_t *count) {
#else
API int cudaStreamGetCaptureInfo(void *s, int *status, unsigned long long *id, void **graph,
                                 void **dependencies, void **edges, size_t *count) {
#endif
  if (edges) *edges = NULL;
  return capture_info(s, status, id, graph, dependencies, count);
}
API int cudaStreamUpdateCaptureDependencies(void *s, ...) { (void)s; return OK; }
API int cudaThreadExchangeStreamCaptureMode(int *mode) { (void)mode; return OK; }
API int cudaGraphCreate(void **graph, unsigned f) { (void)f; *graph = &any_graph; return OK; }
API int cudaGraphInstantiate(void **exec, void *graph, ...) { *exec = graph; return OK; }
API int cudaGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long f) { (void)f; *exec = graph; return OK; }
API int cudaGraphLaunch(void *exec, void *s) { (void)exec; (void)s; emu_note_launch("cudaGraphLaunch", 1, 1, 1, 1, 1, 1); return OK; }
API int cudaGraphUpload(void *exec, void *s) { (void)exec; (void)s; return OK; }
API int cudaGraphDestroy(void *graph) { (void)graph; return OK; }
API int cudaGraphExecDestroy(void *exec) { (void)exec; return OK; }
API int cudaGraphGetNodes(void *graph, void *nodes, size_t *count) { (void)graph; (void)nodes; *count = 0; return OK; }

/* -- kernels --------------------------------------------------------------------------------------- */

typedef struct { unsigned x, y, z; } dim3;

/* Host stubs of kernels, with their mangled names. Registered while libraries load. */
#define KERNELS (1u << 20)
static struct { const void *stub; const char *name; const void *binary; int code; } kernels[KERNELS];
static pthread_mutex_t kernel_lock = PTHREAD_MUTEX_INITIALIZER;

static unsigned slot_of(const void *stub) {
  unsigned i = (unsigned)(((uintptr_t)stub >> 4) * 2654435761u) % KERNELS;
  while (kernels[i].stub && kernels[i].stub != stub) i = (i + 1) % KERNELS;
  return i;
}
/* The architecture of the kernel's code that runs on the device; negative for none. */
static int code_of(const void *stub) {
  unsigned i = slot_of(stub);
  if (!kernels[i].code) {
    const struct emu_config *c = emu_config();
    int wanted = c->capability_major * 10 + c->capability_minor;
    int found = architecture_that_runs(kernels[i].binary, wanted);
    kernels[i].code = found ? found : -1;
  }
  return kernels[i].code;
}
static const char *name_of(const void *stub) {
  const char *name = kernels[slot_of(stub)].name;
  return name ? name : "a kernel without a name";
}
/* A handle has its binary first. It lives as long as the process: kernels refer to it. */
API void **__cudaRegisterFatBinary(void *binary) {
  static void *none[8];
  void **handle = calloc(8, sizeof *handle);
  if (!handle) return none;
  handle[0] = binary;
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
API void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
API char __cudaInitModule(void **handle) { (void)handle; return 1; }
API void __cudaRegisterFunction(void **handle, const char *stub, char *device, const char *name,
                                int limit, void *a, void *b, void *c, void *d, int *e) {
  (void)device; (void)limit; (void)a; (void)b; (void)c; (void)d; (void)e;
  pthread_mutex_lock(&kernel_lock);
  unsigned i = slot_of(stub);
  kernels[i].stub = stub;
  kernels[i].binary = handle ? handle[0] : NULL;
  kernels[i].name = name;
  pthread_mutex_unlock(&kernel_lock);
}

/* Variables on the device: part of the loaded module, which the context's size covers. */
#define VARIABLES 4096
static struct { const void *host; size_t size; void *address; } variables[VARIABLES];
static int variable_count;
API void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int ext,
                           size_t size, int constant, int global) {
  (void)handle; (void)address; (void)name; (void)ext; (void)constant; (void)global;
  pthread_mutex_lock(&kernel_lock);
  if (variable_count < VARIABLES) {
    variables[variable_count].host = host;
    variables[variable_count++].size = size;
  }
  pthread_mutex_unlock(&kernel_lock);
}
API void __cudaRegisterManagedVar(void **h, void **host, char *a, const char *n, int e, size_t size, int c, int g) {
  __cudaRegisterVar(h, (char *)host, a, n, e, size, c, g);
}
static int variable_of(const void *host) {
  for (int i = 0; i < variable_count; i++)
    if (variables[i].host == host) {
      if (!variables[i].address) variables[i].address = calloc(1, variables[i].size);
      return i;
    }
  return -1;
}
API int cudaGetSymbolAddress(void **p, const void *symbol) {
  int i = variable_of(symbol);
  if (i < 0) return fail(INVALID_VALUE);
  *p = variables[i].address;
  return OK;
}
API int cudaGetSymbolSize(size_t *size, const void *symbol) {
  int i = variable_of(symbol);
  if (i < 0) return fail(INVALID_VALUE);
  *size = variables[i].size;
  return OK;
}
API int cudaMemcpyToSymbol(const void *symbol, const void *from, size_t n, size_t offset, int kind) {
  (void)kind;
  int i = variable_of(symbol);
  if (i < 0 || offset + n > variables[i].size) return fail(INVALID_VALUE);
  memcpy((char *)variables[i].address + offset, from, n);
  return OK;
}
API int cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t n, size_t offset, int kind, void *s) {
  (void)s;
  return cudaMemcpyToSymbol(symbol, from, n, offset, kind);
}

struct call { dim3 grid, block; size_t shared; void *stream; };
static __thread struct call calls[64];
static __thread int call_depth;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  if (call_depth < 64) calls[call_depth] = (struct call){grid, block, shared, stream};
  call_depth++;
  return 0;
}
API int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  if (call_depth <= 0) return fail(INVALID_VALUE);
  call_depth--;
  const struct call *one = &calls[call_depth < 64 ? call_depth : 63];
  *grid = one->grid;
  *block = one->block;
  *shared = one->shared;
  *(void **)stream = one->stream;
  return OK;
}
static int launch(const void *stub, dim3 grid, dim3 block) {
  if (code_of(stub) < 0) return fail(NO_IMAGE);
  emu_note_launch(name_of(stub), grid.x, grid.y, grid.z, block.x, block.y, block.z);
  return OK;
}
API int cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, void *s) {
  (void)args; (void)shared; (void)s;
  return launch(f, grid, block);
}
API int __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **args, size_t shared, void *s) {
  (void)args; (void)shared; (void)s;
  return launch(kernel, grid, block);
}
API int __cudaLaunchKernel_ptsz(void *kernel, dim3 grid, dim3 block, void **args, size_t shared, void *s) {
  return __cudaLaunchKernel(kernel, grid, block, args, shared, s);
}
API int __cudaGetKernel(void **kernel, const void *stub) { *kernel = (void *)stub; return OK; }
API int cudaGetKernel(void **kernel, const void *stub) { *kernel = (void *)stub; return OK; }
API int cudaGetFuncBySymbol(void **function, const void *stub) { *function = (void *)stub; return OK; }
API int cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, void *s) {
  return cudaLaunchKernel(f, grid, block, args, shared, s);
}
struct launch_config { dim3 grid, block; size_t shared; void *stream, *attributes; unsigned count; };
API int cudaLaunchKernelExC(const struct launch_config *c, const void *f, void **args) {
  (void)args;
  return launch(f, c->grid, c->block);
}
/* Kernels of modules that are loaded at run time (nvrtc, CUTLASS's own loaders). */
static const char loaded_kernel[] = "a kernel loaded at run time";
API int cudaLibraryLoadData(void **library, ...) { static int any; *library = &any; return OK; }
API int cudaLibraryUnload(void *library) { (void)library; return OK; }
API int cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  (void)library;
  const char *copy = strdup(name);
  *kernel = (void *)(copy ? copy : loaded_kernel);
  __cudaRegisterFunction(NULL, *kernel, NULL, *kernel, 0, NULL, NULL, NULL, NULL, NULL);
  return OK;
}
API int cudaKernelSetAttributeForDevice(void *k, int a, int v, int d) { (void)k; (void)a; (void)v; (void)d; return OK; }
API int cudaFuncSetAttribute(const void *f, int a, int v) { (void)f; (void)a; (void)v; return OK; }
API int cudaFuncSetCacheConfig(const void *f, int c) { (void)f; (void)c; return OK; }

/* cudaFuncAttributes, driver_types.h. Registers are an assumption: 32 a thread let every kernel run
 * with as many threads as fit otherwise. */
struct function_attributes {
  size_t shared, constant, local;
  int threads_per_block, registers, ptx_version, binary_version, cache_mode, dynamic_shared;
  int rest[24];
};
API int cudaFuncGetAttributes(struct function_attributes *a, const void *f) {
  const struct emu_config *c = emu_config();
  memset(a, 0, sizeof *a);
  a->threads_per_block = 1024;
  a->registers = 32;
  if (code_of(f) < 0) return fail(NO_IMAGE);
  a->ptx_version = a->binary_version = code_of(f);
  a->dynamic_shared = c->shared_per_block_optin_bytes;
  return OK;
}
static int active_blocks(int block, size_t shared) {
  const struct emu_config *c = emu_config();
  int blocks = block > 0 ? c->threads_per_multiprocessor / ((block + 31) / 32 * 32) : 1;
  if (blocks > c->blocks_per_multiprocessor) blocks = c->blocks_per_multiprocessor;
  if (shared && (int)(c->shared_per_multiprocessor_bytes / shared) < blocks)
    blocks = c->shared_per_multiprocessor_bytes / shared;
  return blocks < 1 ? 1 : blocks;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t shared) {
  (void)f;
  *n = active_blocks(block, shared);
  return OK;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t shared, unsigned flags) {
  (void)flags;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, f, block, shared);
}
API int cudaOccupancyMaxActiveClusters(int *n, const void *f, const void *c) {
  (void)f; (void)c;
  *n = emu_config()->multiprocessors / 2;
  return OK;
}
API int cudaOccupancyMaxPotentialClusterSize(int *n, const void *f, const void *c) { (void)f; (void)c; *n = 8; return OK; }
API int cudaProfilerStart(void) { return OK; }
API int cudaProfilerStop(void) { return OK; }

/* -- the driver's functions by name ------------------------------------------------------------------ */

static void *driver_function(const char *name) {
  static void *driver;
  if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
  void *(*find)(const char *) = driver ? dlsym(driver, "emu_driver_function") : NULL;
  return find ? find(name) : emu_unknown_function(name);
}
API int cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned v, unsigned long long flags, int *found) {
  (void)v; (void)flags;
  *f = driver_function(name);
  if (found) *found = 0;
  return OK;
}
API int cudaGetDriverEntryPoint(const char *name, void **f, unsigned long long flags, int *found) {
  return cudaGetDriverEntryPointByVersion(name, f, 0, flags, found);
}
