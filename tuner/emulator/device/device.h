/* The emulated machine: what the stand-in libraries share.
 *
 * One library, libtuner_device.so, holds the state of this process and the memory that all
 * processes of a session share (struct emu_shared, made by tuner/emulator/session.py). Each
 * stand-in library (CUDA runtime, driver, cuBLAS, ...) is linked against it. Nothing here needs
 * a CUDA header: the few structures that cross the boundary are declared where they are filled.
 */
#ifndef TUNER_DEVICE_H
#define TUNER_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#define EMU_EXPORT __attribute__((visibility("default")))

/* -- what all processes of a session share; the layout is written by session.py -------------- */

#define EMU_MAGIC 0x3145554e52455554ull
#define EMU_VERSION 5
#define EMU_DEVICES 64
#define EMU_ACCOUNTS 512
#define EMU_UNKNOWN 2048
#define EMU_NAME 120
#define EMU_NCCL_RANKS 8

/* The GPU type; every device of a session is of one type. */
struct emu_config {
  uint64_t magic;
  uint32_t version;
  uint32_t device_count;
  uint64_t memory_bytes;  /* what get_device_properties().total_memory says */
  uint64_t context_bytes; /* device memory that the context of each process takes */
  uint64_t nccl_bytes[EMU_NCCL_RANKS + 1]; /* of a communicator over so many ranks, on each */
  int32_t capability_major;
  int32_t capability_minor;
  int32_t multiprocessors;
  int32_t shared_per_block_optin_bytes;
  int32_t shared_per_multiprocessor_bytes;
  int32_t threads_per_multiprocessor;
  int32_t blocks_per_multiprocessor;
  int32_t l2_bytes;
  int32_t clock_khz;
  int32_t memory_clock_khz;
  int32_t memory_bus_bits;
  int32_t power_limit_mw;
  int32_t owner_pid; /* the process that made the session: when it is gone, the programs go */
  int32_t seed;
  int32_t one_rank; /* one process stands for all ranks of a training */
  char name[256];
};

/* What one process holds on one device. */
struct emu_account {
  int32_t pid; /* 0: free */
  int32_t device;
  uint64_t used_bytes; /* context included */
  uint64_t peak_bytes;
  uint64_t at_running_bytes, at_peak_bytes; /* at the peaks of struct emu_device */
  uint64_t managed_bytes; /* cudaMallocManaged: outside of torch's allocator, counted apart */
  uint64_t managed_peak_bytes;
  uint64_t pinned_bytes; /* host memory; of the process, on its first device */
  uint64_t refused_bytes; /* the last request that did not fit and was not met later; else 0 */
  uint64_t refused_ns;    /* when, on CLOCK_MONOTONIC; 0 where nothing is refused */
  uint64_t launches;
  uint64_t launches_unpriced;
  char command[EMU_NAME]; /* the process's, its words parted by blanks */
};

/* The peaks of all processes together on one device. An attempt begins where the last step ended;
 * one that ends with a request that PyTorch gave up tells how much memory there is, not how much is
 * needed. */
struct emu_device {
  uint64_t peak_bytes;    /* before the running attempt, without those that were given up */
  uint64_t running_bytes; /* in the running attempt */
  uint64_t given_up_bytes;
};

struct emu_unknown {
  char name[EMU_NAME];
  uint64_t calls;
};

struct emu_shared {
  struct emu_config config;
  int32_t lock; /* a futex-free spin lock over accounts and unknown; held for microseconds */
  int32_t reserved;
  struct emu_device devices[EMU_DEVICES];
  struct emu_account accounts[EMU_ACCOUNTS];
  struct emu_unknown unknown[EMU_UNKNOWN];
};

/* The shared memory; loads it on first use and ends the process with a message where there is
 * none. */
EMU_EXPORT struct emu_shared *emu_shared(void);
static inline const struct emu_config *emu_config(void) { return &emu_shared()->config; }

/* -- device memory --------------------------------------------------------------------------- */

/* Each takes a device ordinal of the session (not of CUDA_VISIBLE_DEVICES). Addresses are mapped
 * host memory, which takes pages only where it is written. */

/* 0, or -1 where the device has no room; `*address` is aligned to 512 bytes. */
EMU_EXPORT int emu_alloc(int device, size_t size, void **address);
/* 0, or -1 for what is no allocation. */
EMU_EXPORT int emu_free(void *address);
/* Base and size of the allocation that holds `p`; 0, or -1 for an address of no allocation. */
EMU_EXPORT int emu_range(const void *p, void **base, size_t *size, int *device);
EMU_EXPORT int emu_is_device_pointer(const void *p);
/* Managed memory: host and device. */
EMU_EXPORT int emu_alloc_managed(int device, size_t size, void **address);
EMU_EXPORT int emu_host_kind(const void *p); /* 0: neither; 1: pinned; 3: managed (cudaMemoryType) */
/* Pinned host memory. */
EMU_EXPORT void *emu_alloc_pinned(size_t size);
EMU_EXPORT int emu_free_pinned(void *p); /* 0, or -1 for what is none */
/* For virtual memory management: addresses without memory, and memory without addresses. */
EMU_EXPORT void *emu_reserve(size_t size, size_t alignment);
EMU_EXPORT void emu_unreserve(void *p, size_t size);
EMU_EXPORT int emu_take(int device, size_t size); /* 0, or -1 without room */
EMU_EXPORT void emu_give(int device, size_t size);
/* On all devices of this process: a new attempt begins, or the running one was given up. */
EMU_EXPORT void emu_begin_attempt(void);
EMU_EXPORT void emu_give_up_attempt(void);
EMU_EXPORT void emu_forget_pages(void *p, size_t size);
EMU_EXPORT void emu_memory_info(int device, size_t *free_bytes, size_t *total_bytes);
/* The same without becoming one of the device's processes: for NVML. */
EMU_EXPORT void emu_memory_of(int device, size_t *free_bytes, size_t *total_bytes);
/* The context of this process on a device exists from the first use on. */
EMU_EXPORT void emu_touch(int device);
EMU_EXPORT int emu_is_touched(int device);

/* -- this process ---------------------------------------------------------------------------- */

/* Ordinals as CUDA_VISIBLE_DEVICES shows them. */
EMU_EXPORT int emu_visible_count(void);
EMU_EXPORT int emu_physical(int ordinal); /* ordinal of the session, or -1 */
EMU_EXPORT int emu_current(void);         /* of this thread: an ordinal as visible */
EMU_EXPORT void emu_set_current(int ordinal);
static inline int emu_current_physical(void) { return emu_physical(emu_current()); }

/* cudaDeviceAttr and CUdevice_attribute, whose numbers are the same. */
EMU_EXPORT int emu_attribute(int attribute, int physical);

/* A call to a function that the emulator does not know: counted, and reported at the end. */
EMU_EXPORT void emu_unknown(const char *name);
/* A function to hand out for a name that is looked up and not known; calls are counted. */
EMU_EXPORT void *emu_unknown_function(const char *name);

/* -- answers to what kernels would have left in device memory (answers.c) ----------------------- */

EMU_EXPORT int emu_answer(const void *bytes, size_t size);
EMU_EXPORT int emu_forget_answers(void);

/* Every copy of the runtime and of the driver: rows of `width` bytes. Small ones are made. Before
 * a copy from device to host that no answer is there for, the reader is asked: 1 if the bytes in
 * memory are what the program is to read. 0, or -1 where they are not. */
EMU_EXPORT int emu_copy_rows(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                             size_t width, size_t height);
static inline int emu_copy(void *to, const void *from, size_t size) {
  return emu_copy_rows(to, size, from, size, size, 1);
}
typedef int (*emu_reader)(void *to, const void *from, size_t size);
EMU_EXPORT void emu_set_reader(emu_reader reader);

/* -- this process's memory on the host (host.c) ------------------------------------------------- */

EMU_EXPORT void emu_device_range(char **start, size_t *size); /* addresses in use, or none */
EMU_EXPORT void emu_host_add(void *start, size_t size);
EMU_EXPORT void emu_host_remove(void *start);
EMU_EXPORT void emu_host_watch(void);
EMU_EXPORT int64_t emu_host_peak(void);

/* -- launches and time ------------------------------------------------------------------------ */

struct emu_launch {
  const char *name; /* mangled, lives as long as the process */
  uint32_t grid[3];
  uint32_t block[3];
};

/* Every launch of a kernel; products are launches named after their function, with m, n, k. */
EMU_EXPORT void emu_note_launch(const char *name, unsigned gx, unsigned gy, unsigned gz,
                                unsigned bx, unsigned by, unsigned bz);
EMU_EXPORT uint64_t emu_launch_count(void);
/* The launches from number `first` on, at most `most`; returns how many were written. The last
 * 65,536 are kept. */
EMU_EXPORT uint64_t emu_launches(uint64_t first, struct emu_launch *out, uint64_t most);

/* The virtual clock, in nanoseconds since the process began. The host issues work, the device
 * does it in order: an operator costs the host `host_ns`, and the device `device_ns` after it. */
EMU_EXPORT void emu_work(double host_ns, double device_ns);
EMU_EXPORT double emu_device_now_ns(void);
EMU_EXPORT double emu_host_now_ns(void);
EMU_EXPORT void emu_synchronize(void); /* the host waits for the device */

#endif
