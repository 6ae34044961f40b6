/* Stands in for libcuda (CUDA driver API), as far as PyTorch, Triton and bitsandbytes go.
 *
 * A CUdevice is the ordinal that CUDA_VISIBLE_DEVICES shows. Layouts are those of cuda.h.
 */
#define _GNU_SOURCE
#include "device.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API EMU_EXPORT

enum {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  NOT_FOUND = 500,
  NOT_SUPPORTED = 801,
};

/* -- start, errors, devices ---------------------------------------------------------------------- */

API int cuInit(unsigned flags) { (void)flags; return emu_visible_count() ? OK : NO_DEVICE; }
API int cuDriverGetVersion(int *v) { *v = 13000; return OK; }
API int cuGetErrorString(int code, const char **text) {
  *text = code == OUT_OF_MEMORY ? "out of memory" : code ? "an error of the emulated device" : "no error";
  return OK;
}
API int cuGetErrorName(int code, const char **name) {
  *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code ? "CUDA_ERROR_UNKNOWN" : "CUDA_SUCCESS";
  return OK;
}
API int cuDeviceGetCount(int *count) { *count = emu_visible_count(); return OK; }
API int cuDeviceGet(int *device, int ordinal) {
  if (emu_physical(ordinal) < 0) return INVALID_DEVICE;
  *device = ordinal;
  return OK;
}
API int cuDeviceGetName(char *name, int size, int device) {
  (void)device;
  snprintf(name, size, "%s", emu_config()->name);
  return OK;
}
API int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = emu_config()->memory_bytes; return OK; }
API int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  memset(uuid, 0, 16);
  uuid[3] = emu_physical(device);
  return OK;
}
API int cuDeviceGetUuid(unsigned char *uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }
API int cuDeviceGetAttribute(int *value, int attribute, int device) {
  int physical = emu_physical(device);
  if (physical < 0) return INVALID_DEVICE;
  *value = emu_attribute(attribute, physical);
  return OK;
}
API int cuDeviceComputeCapability(int *major, int *minor, int device) {
  (void)device;
  *major = emu_config()->capability_major;
  *minor = emu_config()->capability_minor;
  return OK;
}
API int cuDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", emu_physical(device) + 1);
  return OK;
}
API int cuDeviceCanAccessPeer(int *can, int a, int b) { *can = a != b; return OK; }
API int cuDeviceGetP2PAttribute(int *v, int a, int b, int c) { (void)a; (void)b; (void)c; *v = 1; return OK; }

/* -- contexts: only the primary one of each device ------------------------------------------------ */

static char contexts[EMU_DEVICES];
static __thread int has_current;

API int cuDevicePrimaryCtxRetain(void **context, int device) {
  int physical = emu_physical(device);
  if (physical < 0) return INVALID_DEVICE;
  emu_touch(physical);
  *context = &contexts[physical];
  return OK;
}
API int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return OK; }
API int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { (void)device; (void)flags; return OK; }
API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  if (flags) *flags = 0;
  if (active) *active = emu_is_touched(emu_physical(device));
  return OK;
}
API int cuCtxGetCurrent(void **context) {
  int physical = emu_current_physical();
  *context = has_current || emu_is_touched(physical) ? &contexts[physical] : NULL;
  return OK;
}
API int cuCtxSetCurrent(void *context) {
  has_current = context != NULL;
  for (int i = 0; context && i < emu_visible_count(); i++)
    if (&contexts[emu_physical(i)] == context) emu_set_current(i);
  return OK;
}
API int cuCtxPushCurrent_v2(void *context) { return cuCtxSetCurrent(context); }
API int cuCtxPopCurrent_v2(void **context) { return context ? cuCtxGetCurrent(context) : OK; }
API int cuCtxCreate_v2(void **context, unsigned flags, int device) { (void)flags; return cuDevicePrimaryCtxRetain(context, device); }
API int cuCtxDestroy_v2(void *context) { (void)context; return OK; }
API int cuCtxGetDevice(int *device) { *device = emu_current(); return OK; }
API int cuCtxGetFlags(unsigned *flags) { *flags = 0; return OK; }
API int cuCtxGetApiVersion(void *context, unsigned *v) { (void)context; *v = 13000; return OK; }
API int cuCtxSynchronize(void) { emu_synchronize(); return OK; }
API int cuCtxGetStreamPriorityRange(int *a, int *b) { if (a) *a = 0; if (b) *b = -5; return OK; }
API int cuCtxEnablePeerAccess(void *context, unsigned flags) { (void)context; (void)flags; return OK; }
API int cuCtxGetLimit(size_t *value, int limit) { (void)limit; *value = 1024; return OK; }
API int cuCtxSetLimit(int limit, size_t value) { (void)limit; (void)value; return OK; }

/* -- memory ------------------------------------------------------------------------------------------ */

API int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  emu_memory_info(emu_current_physical(), free_bytes, total);
  return OK;
}
API int cuMemAlloc_v2(void **p, size_t size) {
  return emu_alloc(emu_current_physical(), size, p) ? OUT_OF_MEMORY : OK;
}
API int cuMemFree_v2(void *p) { return emu_free(p) && emu_free_pinned(p) ? INVALID_VALUE : OK; }
API int cuMemAllocManaged(void **p, size_t size, unsigned flags) {
  (void)flags;
  return emu_alloc_managed(emu_current_physical(), size, p) ? OUT_OF_MEMORY : OK;
}
API int cuMemHostAlloc(void **p, size_t size, unsigned flags) {
  (void)flags;
  *p = emu_alloc_pinned(size);
  return *p ? OK : OUT_OF_MEMORY;
}
API int cuMemFreeHost(void *p) { return emu_free_pinned(p) ? INVALID_VALUE : OK; }
API int cuMemHostRegister_v2(void *p, size_t size, unsigned f) { (void)p; (void)size; (void)f; return OK; }
API int cuMemHostUnregister(void *p) { (void)p; return OK; }
API int cuMemGetAddressRange_v2(void **base, size_t *size, void *p) {
  void *start;
  size_t found;
  int device;
  if (emu_range(p, &start, &found, &device)) return NOT_FOUND;
  if (base) *base = start;
  if (size) *size = found;
  return OK;
}
static int pointer_attribute(void *value, int attribute, void *p) {
  void *start;
  size_t size;
  int device;
  if (emu_range(p, &start, &size, &device)) return INVALID_VALUE;
  switch (attribute) {
    case 1: *(void **)value = &contexts[device]; return OK;
    case 2: *(int *)value = 2; return OK;     /* memory type: device */
    case 3: *(void **)value = p; return OK;   /* device pointer */
    case 6: return OK;                        /* synchronous operations */
    case 7: *(uint64_t *)value = (uintptr_t)start; return OK; /* buffer id */
    case 8: *(int *)value = 0; return OK;     /* managed */
    case 9: *(int *)value = device; return OK;
    case 11: *(void **)value = start; return OK;
    case 12: *(size_t *)value = size; return OK;
    case 13: *(int *)value = 1; return OK;    /* mapped */
    default: memset(value, 0, 4); return OK;
  }
}
API int cuPointerGetAttribute(void *value, int attribute, void *p) { return pointer_attribute(value, attribute, p); }
API int cuPointerGetAttributes(unsigned count, int *attributes, void **values, void *p) {
  for (unsigned i = 0; i < count; i++)
    if (pointer_attribute(values[i], attributes[i], p)) *(int *)values[i] = 0;
  return OK;
}
API int cuPointerSetAttribute(const void *value, int attribute, void *p) { (void)value; (void)attribute; (void)p; return OK; }

#define KEPT (1u << 20) /* fills up to here are made, as in the runtime */
static int copy(void *to, const void *from, size_t size) {
  return emu_copy(to, from, size) ? NOT_SUPPORTED : OK;
}
API int cuMemcpyHtoD_v2(void *to, const void *from, size_t size) { return copy(to, from, size); }
API int cuMemcpyDtoH_v2(void *to, const void *from, size_t size) { return copy(to, from, size); }
API int cuMemcpyDtoD_v2(void *to, const void *from, size_t size) { return copy(to, from, size); }
API int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t size, void *s) { (void)s; return copy(to, from, size); }
API int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t size, void *s) { (void)s; return copy(to, from, size); }
API int cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t size, void *s) { (void)s; return copy(to, from, size); }
API int cuMemcpyAsync(void *to, const void *from, size_t size, void *s) { (void)s; return copy(to, from, size); }
API int cuMemcpy(void *to, const void *from, size_t size) { return copy(to, from, size); }
API int cuMemsetD8_v2(void *p, unsigned char v, size_t n) { if (n <= KEPT) memset(p, v, n); return OK; }
API int cuMemsetD8Async(void *p, unsigned char v, size_t n, void *s) { (void)s; return cuMemsetD8_v2(p, v, n); }
API int cuMemsetD32_v2(unsigned *p, unsigned v, size_t n) { for (size_t i = 0; i < n && n <= KEPT / 4; i++) p[i] = v; return OK; }
API int cuMemsetD32Async(unsigned *p, unsigned v, size_t n, void *s) { (void)s; return cuMemsetD32_v2(p, v, n); }
API int cuMemPrefetchAsync(void *p, size_t n, ...) { (void)p; (void)n; return OK; }
API int cuMemAdvise(void *p, size_t n, ...) { (void)p; (void)n; return OK; }

/* -- virtual memory management (expandable segments) ---------------------------------------------------- */

/* Memory without addresses: freed when it is released and mapped nowhere. */
struct physical {
  size_t size;
  int device, references;
};
struct mapping {
  void *address;
  size_t size;
  struct physical *memory;
  struct mapping *next;
};
struct allocation_properties { /* CUmemAllocationProp */
  int type, handle_types, location_type, location_id;
};
static struct mapping *mappings;
static pthread_mutex_t map_lock = PTHREAD_MUTEX_INITIALIZER;

static void drop(struct physical *memory) {
  if (--memory->references) return;
  emu_give(memory->device, memory->size);
  free(memory);
}
API int cuMemGetAllocationGranularity(size_t *size, const void *properties, int option) {
  (void)properties; (void)option;
  *size = 2u << 20;
  return OK;
}
API int cuMemAddressReserve(void **p, size_t size, size_t alignment, void *wanted, unsigned long long f) {
  (void)wanted; (void)f;
  *p = emu_reserve(size, alignment);
  return *p ? OK : OUT_OF_MEMORY;
}
API int cuMemAddressFree(void *p, size_t size) { emu_unreserve(p, size); return OK; }
API int cuMemCreate(struct physical **handle, size_t size, const struct allocation_properties *p, unsigned long long f) {
  (void)f;
  int device = p->location_type == 1 ? emu_physical(p->location_id) : emu_current_physical();
  if (device < 0) return INVALID_DEVICE;
  struct physical *one = malloc(sizeof *one);
  if (!one) return OUT_OF_MEMORY;
  *one = (struct physical){size, device, 1};
  if (emu_take(device, size)) {
    free(one);
    return OUT_OF_MEMORY;
  }
  *handle = one;
  return OK;
}
API int cuMemRelease(struct physical *handle) {
  pthread_mutex_lock(&map_lock);
  drop(handle);
  pthread_mutex_unlock(&map_lock);
  return OK;
}
API int cuMemMap(void *p, size_t size, size_t offset, struct physical *handle, unsigned long long f) {
  (void)offset; (void)f;
  struct mapping *one = malloc(sizeof *one);
  if (!one) return OUT_OF_MEMORY;
  pthread_mutex_lock(&map_lock);
  *one = (struct mapping){p, size, handle, mappings};
  mappings = one;
  handle->references++;
  pthread_mutex_unlock(&map_lock);
  return OK;
}
API int cuMemUnmap(void *p, size_t size) {
  pthread_mutex_lock(&map_lock);
  for (struct mapping **link = &mappings; *link;) {
    struct mapping *one = *link;
    if ((char *)one->address < (char *)p || (char *)one->address >= (char *)p + size) {
      link = &one->next;
      continue;
    }
    *link = one->next;
    emu_forget_pages(one->address, one->size);
    drop(one->memory);
    free(one);
  }
  pthread_mutex_unlock(&map_lock);
  return OK;
}
API int cuMemSetAccess(void *p, size_t n, const void *d, size_t count) { (void)p; (void)n; (void)d; (void)count; return OK; }
API int cuMemGetAccess(unsigned long long *flags, const void *location, void *p) { (void)location; (void)p; *flags = 3; return OK; }
API int cuMemRetainAllocationHandle(struct physical **handle, void *p) {
  pthread_mutex_lock(&map_lock);
  int result = NOT_FOUND;
  for (struct mapping *one = mappings; one && result; one = one->next)
    if ((char *)p >= (char *)one->address && (char *)p < (char *)one->address + one->size) {
      one->memory->references++;
      *handle = one->memory;
      result = OK;
    }
  pthread_mutex_unlock(&map_lock);
  return result;
}
API int cuMemGetAllocationPropertiesFromHandle(struct allocation_properties *p, struct physical *handle) {
  memset(p, 0, 32);
  p->type = p->location_type = 1;
  p->location_id = handle->device;
  return OK;
}
/* Memory of other processes is not reached: programs take their other way. */
API int cuMemExportToShareableHandle(void *out, void *handle, int type, unsigned long long f) { (void)out; (void)handle; (void)type; (void)f; return NOT_SUPPORTED; }
API int cuMemImportFromShareableHandle(void *out, void *handle, int type) { (void)out; (void)handle; (void)type; return NOT_SUPPORTED; }
API int cuMulticastCreate(void *handle, const void *p) { (void)handle; (void)p; return NOT_SUPPORTED; }

/* -- streams and events: those of the runtime ------------------------------------------------------------ */

#define RUNTIME(name, runtime, parameters, arguments) \
  extern int runtime parameters __attribute__((weak)); \
  API int name parameters { \
    static int (*function) parameters; \
    if (!function) function = dlsym(RTLD_DEFAULT, #runtime); \
    if (!function) { emu_unknown(#name); return OK; } \
    return function arguments; \
  }
RUNTIME(cuStreamCreate, cudaStreamCreateWithFlags, (void **s, unsigned f), (s, f))
RUNTIME(cuStreamCreateWithPriority, cudaStreamCreateWithPriority, (void **s, unsigned f, int p), (s, f, p))
RUNTIME(cuStreamDestroy_v2, cudaStreamDestroy, (void *s), (s))
RUNTIME(cuStreamIsCapturing, cudaStreamIsCapturing, (void *s, int *v), (s, v))
RUNTIME(cuStreamGetPriority, cudaStreamGetPriority, (void *s, int *v), (s, v))
RUNTIME(cuEventCreate, cudaEventCreateWithFlags, (void **e, unsigned f), (e, f))
RUNTIME(cuEventRecord, cudaEventRecord, (void *e, void *s), (e, s))
RUNTIME(cuEventDestroy_v2, cudaEventDestroy, (void *e), (e))
RUNTIME(cuEventElapsedTime, cudaEventElapsedTime, (float *ms, void *a, void *b), (ms, a, b))
API int cuStreamQuery(void *s) { (void)s; return OK; }
API int cuStreamSynchronize(void *s) { (void)s; emu_synchronize(); return OK; }
API int cuStreamWaitEvent(void *s, void *e, unsigned f) { (void)s; (void)e; (void)f; return OK; }
API int cuStreamGetCtx(void *s, void **context) { (void)s; return cuCtxGetCurrent(context); }
API int cuEventQuery(void *e) { (void)e; return OK; }
API int cuEventSynchronize(void *e) { (void)e; emu_synchronize(); return OK; }
API int cuStreamWriteValue32_v2(void *s, unsigned *p, unsigned v, unsigned f) { (void)s; (void)f; *p = v; return OK; }
API int cuStreamWaitValue32_v2(void *s, void *p, unsigned v, unsigned f) { (void)s; (void)p; (void)v; (void)f; return OK; }
API int cuLaunchHostFunc(void *s, void (*function)(void *), void *data) { (void)s; function(data); return OK; }

/* -- modules and kernels (Triton, nvrtc, CUTLASS) ---------------------------------------------------------- */

struct function { char name[256]; };
static int any_module;

static int make_function(void **f, const char *name) {
  struct function *one = calloc(1, sizeof *one);
  if (!one) return OUT_OF_MEMORY;
  snprintf(one->name, sizeof one->name, "%s", name);
  *f = one;
  return OK;
}
API int cuModuleLoad(void **m, const char *file) { (void)file; *m = &any_module; return OK; }
API int cuModuleLoadData(void **m, const void *image) { (void)image; *m = &any_module; return OK; }
API int cuModuleLoadDataEx(void **m, const void *image, unsigned n, void *a, void *b) { (void)image; (void)n; (void)a; (void)b; *m = &any_module; return OK; }
API int cuModuleLoadFatBinary(void **m, const void *image) { (void)image; *m = &any_module; return OK; }
API int cuModuleUnload(void *m) { (void)m; return OK; }
API int cuModuleGetLoadingMode(int *mode) { *mode = 2; return OK; } /* lazy */
API int cuModuleGetFunction(void **f, void *m, const char *name) { (void)m; return make_function(f, name); }
API int cuModuleGetGlobal_v2(void **p, size_t *size, void *m, const char *name) {
  (void)m; (void)name;
  if (size) *size = 0;
  if (p) *p = NULL;
  return NOT_FOUND;
}
API int cuLibraryLoadData(void **library, ...) { *library = &any_module; return OK; }
API int cuLibraryLoadFromFile(void **library, ...) { *library = &any_module; return OK; }
API int cuLibraryUnload(void *library) { (void)library; return OK; }
API int cuLibraryGetModule(void **m, void *library) { (void)library; *m = &any_module; return OK; }
API int cuLibraryGetKernel(void **k, void *library, const char *name) { (void)library; return make_function(k, name); }
API int cuKernelGetFunction(void **f, void *kernel) { *f = kernel; return OK; }
API int cuKernelGetAttribute(int *v, int a, void *k, int d);
API int cuKernelSetAttribute(int a, int v, void *k, int d) { (void)a; (void)v; (void)k; (void)d; return OK; }
API int cuFuncSetAttribute(void *f, int a, int v) { (void)f; (void)a; (void)v; return OK; }
API int cuFuncSetCacheConfig(void *f, int c) { (void)f; (void)c; return OK; }
API int cuFuncGetName(const char **name, void *f) { *name = ((struct function *)f)->name; return OK; }
API int cuFuncGetModule(void **m, void *f) { (void)f; *m = &any_module; return OK; }
API int cuFuncLoad(void *f) { (void)f; return OK; }
/* Numbers as the runtime's cudaFuncGetAttributes has them, assumptions included. */
API int cuFuncGetAttribute(int *value, int attribute, void *f) {
  (void)f;
  const struct emu_config *c = emu_config();
  switch (attribute) {
    case 0: *value = 1024; break;
    case 4: *value = 32; break;
    case 5: case 6: *value = c->capability_major * 10 + c->capability_minor; break;
    case 8: *value = c->shared_per_block_optin_bytes; break;
    default: *value = 0;
  }
  return OK;
}
API int cuKernelGetAttribute(int *value, int attribute, void *k, int device) { (void)device; return cuFuncGetAttribute(value, attribute, k); }

API int cuLaunchKernel(const struct function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                       unsigned bz, unsigned shared, void *s, void **parameters, void **extra) {
  (void)shared; (void)s; (void)parameters; (void)extra;
  emu_note_launch(f->name, gx, gy, gz, bx, by, bz);
  return OK;
}
struct launch_config { unsigned grid[3], block[3], shared; void *stream, *attributes; unsigned count; };
API int cuLaunchKernelEx(const struct launch_config *c, const struct function *f, void **parameters, void **extra) {
  return cuLaunchKernel(f, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared,
                        c->stream, parameters, extra);
}
API int cuLaunchCooperativeKernel(const struct function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                  unsigned by, unsigned bz, unsigned shared, void *s, void **parameters) {
  return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, s, parameters, NULL);
}
API int cuTensorMapEncodeTiled(void *map, ...) { memset(map, 0, 128); return OK; }
API int cuTensorMapEncodeIm2col(void *map, ...) { memset(map, 0, 128); return OK; }
API int cuTensorMapReplaceAddress(void *map, void *p) { (void)map; (void)p; return OK; }
static int active_blocks(int block) {
  int blocks = block > 0 ? emu_config()->threads_per_multiprocessor / block : 1;
  return blocks < 1 ? 1 : blocks;
}
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int block, size_t shared) { (void)f; (void)shared; *n = active_blocks(block); return OK; }
API int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, void *f, int block, size_t shared, unsigned fl) { (void)fl; return cuOccupancyMaxActiveBlocksPerMultiprocessor(n, f, block, shared); }
API int cuOccupancyMaxActiveClusters(int *n, void *f, const void *c) { (void)f; (void)c; *n = emu_config()->multiprocessors / 2; return OK; }
API int cuProfilerStart(void) { return OK; }
API int cuProfilerStop(void) { return OK; }
/* Tables that are not documented, which libraries with the runtime inside ask for: there are none. */
API int cuGetExportTable(const void **table, const void *id) { (void)id; *table = NULL; return NOT_FOUND; }

/* -- functions by name -------------------------------------------------------------------------------------- */

/* The driver maps a base name to its newest version. */
API void *emu_driver_function(const char *name) {
  static const char *const endings[] = {"_v2", "", "_v3"};
  static void *self;
  if (!self) {
    Dl_info info;
    if (dladdr((void *)emu_driver_function, &info)) self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }
  for (unsigned i = 0; self && i < sizeof endings / sizeof *endings; i++) {
    char full[EMU_NAME];
    snprintf(full, sizeof full, "%s%s", name, endings[i]);
    void *found = dlsym(self, full);
    if (found) return found;
  }
  return emu_unknown_function(name);
}
API int cuGetProcAddress_v2(const char *name, void **f, int v, unsigned long long flags, int *status) {
  (void)v; (void)flags;
  *f = emu_driver_function(name);
  if (status) *status = 0;
  return OK;
}
API int cuGetProcAddress(const char *name, void **f, int v, unsigned long long flags) {
  return cuGetProcAddress_v2(name, f, v, flags, NULL);
}
