/* Stands in for libnvidia-ml (NVML): what all processes of the session hold, and the GPU type.
 *
 * Layouts are those of nvml.h. What a device that computes nothing cannot tell (utilisation, power,
 * temperature, energy) is answered "not supported": nothing emulated may look measured.
 */
#define _GNU_SOURCE
#include "device.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API EMU_EXPORT

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7 };

struct device { int index; };
static struct device devices[EMU_DEVICES];

API int nvmlInit_v2(void) { emu_shared(); return OK; }
API int nvmlInit(void) { return nvmlInit_v2(); }
API int nvmlInitWithFlags(unsigned f) { (void)f; return nvmlInit_v2(); }
API int nvmlShutdown(void) { return OK; }
API const char *nvmlErrorString(int code) {
  switch (code) {
    case OK: return "Success";
    case INVALID: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case TOO_SMALL: return "Insufficient Size";
    default: return "Unknown Error";
  }
}
API int nvmlSystemGetDriverVersion(char *text, unsigned n) { snprintf(text, n, "580.00"); return OK; }
API int nvmlSystemGetNVMLVersion(char *text, unsigned n) { snprintf(text, n, "13.580.00"); return OK; }
API int nvmlSystemGetCudaDriverVersion(int *v) { *v = 13000; return OK; }
API int nvmlSystemGetCudaDriverVersion_v2(int *v) { return nvmlSystemGetCudaDriverVersion(v); }
API int nvmlSystemGetProcessName(unsigned pid, char *text, unsigned n) {
  char path[32];
  snprintf(path, sizeof path, "/proc/%u/comm", pid);
  FILE *file = fopen(path, "r");
  if (!file) return NOT_FOUND;
  if (!fgets(text, n, file)) *text = 0;
  fclose(file);
  text[strcspn(text, "\n")] = 0;
  return OK;
}

API int nvmlDeviceGetCount_v2(unsigned *n) { *n = emu_config()->device_count; return OK; }
API int nvmlDeviceGetCount(unsigned *n) { return nvmlDeviceGetCount_v2(n); }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **d) {
  if (index >= emu_config()->device_count) return INVALID;
  devices[index].index = index;
  *d = &devices[index];
  return OK;
}
API int nvmlDeviceGetHandleByIndex(unsigned index, struct device **d) { return nvmlDeviceGetHandleByIndex_v2(index, d); }
API int nvmlDeviceGetUUID(struct device *d, char *text, unsigned n) {
  snprintf(text, n, "GPU-%08x-0000-0000-0000-000000000000", d->index);
  return OK;
}
API int nvmlDeviceGetHandleByUUID(const char *text, struct device **d) {
  unsigned index;
  if (sscanf(text, "GPU-%8x", &index) != 1) return INVALID;
  return nvmlDeviceGetHandleByIndex_v2(index, d) ? NOT_FOUND : OK;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char *text, struct device **d) {
  unsigned domain, bus;
  if (sscanf(text, "%x:%x", &domain, &bus) != 2 || bus == 0) return INVALID;
  return nvmlDeviceGetHandleByIndex_v2(bus - 1, d) ? NOT_FOUND : OK;
}
struct pci_info { /* nvmlPciInfo_t */
  char old_bus_id[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char bus_id[32];
};
API int nvmlDeviceGetPciInfo_v3(struct device *d, struct pci_info *p) {
  memset(p, 0, sizeof *p);
  p->bus = d->index + 1;
  snprintf(p->old_bus_id, sizeof p->old_bus_id, "0000:%02X:00.0", p->bus);
  snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02X:00.0", p->bus);
  return OK;
}
API int nvmlDeviceGetName(struct device *d, char *text, unsigned n) { (void)d; snprintf(text, n, "%s", emu_config()->name); return OK; }
API int nvmlDeviceGetIndex(struct device *d, unsigned *n) { *n = d->index; return OK; }
API int nvmlDeviceGetMinorNumber(struct device *d, unsigned *n) { *n = d->index; return OK; }
API int nvmlDeviceGetCudaComputeCapability(struct device *d, int *major, int *minor) {
  (void)d;
  *major = emu_config()->capability_major;
  *minor = emu_config()->capability_minor;
  return OK;
}
API int nvmlDeviceGetPersistenceMode(struct device *d, int *mode) { (void)d; *mode = 1; return OK; }
API int nvmlDeviceGetMigMode(struct device *d, unsigned *a, unsigned *b) { (void)d; (void)a; (void)b; return NOT_SUPPORTED; }
API int nvmlDeviceGetComputeMode(struct device *d, int *mode) { (void)d; *mode = 0; return OK; }
API int nvmlDeviceGetEnforcedPowerLimit(struct device *d, unsigned *mw) {
  (void)d;
  *mw = emu_config()->power_limit_mw;
  return *mw ? OK : NOT_SUPPORTED;
}
API int nvmlDeviceGetPowerManagementLimit(struct device *d, unsigned *mw) { return nvmlDeviceGetEnforcedPowerLimit(d, mw); }

/* -- memory ------------------------------------------------------------------------------------------- */

struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };

static void memory_of(const struct device *d, size_t *free_bytes, size_t *total) {
  emu_memory_of(d->index, free_bytes, total);
}
API int nvmlDeviceGetMemoryInfo(struct device *d, struct memory *m) {
  size_t free_bytes, total;
  memory_of(d, &free_bytes, &total);
  *m = (struct memory){total, free_bytes, total - free_bytes};
  return OK;
}
API int nvmlDeviceGetMemoryInfo_v2(struct device *d, struct memory_v2 *m) {
  size_t free_bytes, total;
  memory_of(d, &free_bytes, &total);
  m->total = total;
  m->reserved = 0;
  m->free = free_bytes;
  m->used = total - free_bytes;
  return OK;
}

struct process { unsigned pid; unsigned long long used; unsigned instance, compute; };
API int nvmlDeviceGetComputeRunningProcesses_v3(struct device *d, unsigned *count, struct process *out) {
  unsigned found = 0, room = *count;
  const struct emu_shared *all = emu_shared();
  for (int i = 0; i < EMU_ACCOUNTS; i++) {
    const struct emu_account *one = &all->accounts[i];
    if (!one->pid || one->device != d->index || !one->used_bytes) continue;
    if (kill(one->pid, 0) != 0 && errno == ESRCH) continue;
    if (out && found < room) out[found] = (struct process){one->pid, one->used_bytes, ~0u, ~0u};
    found++;
  }
  *count = found;
  return found > room ? TOO_SMALL : OK;
}
API int nvmlDeviceGetComputeRunningProcesses_v2(struct device *d, unsigned *n, struct process *o) { return nvmlDeviceGetComputeRunningProcesses_v3(d, n, o); }
API int nvmlDeviceGetComputeRunningProcesses(struct device *d, unsigned *n, void *o) { (void)o; (void)d; *n = 0; return OK; }
API int nvmlDeviceGetGraphicsRunningProcesses_v3(struct device *d, unsigned *n, void *o) { (void)d; (void)o; *n = 0; return OK; }
API int nvmlDeviceGetMPSComputeRunningProcesses_v3(struct device *d, unsigned *n, void *o) { (void)d; (void)o; *n = 0; return OK; }

/* -- links ---------------------------------------------------------------------------------------------- */

API int nvmlDeviceGetNvLinkState(struct device *d, unsigned link, int *on) { (void)d; (void)link; (void)on; return NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemoteDeviceType(struct device *d, unsigned link, int *type) { (void)d; (void)link; (void)type; return NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(struct device *d, unsigned link, void *p) { (void)d; (void)link; (void)p; return NOT_SUPPORTED; }
API int nvmlDeviceGetP2PStatus(struct device *a, struct device *b, int index, int *status) { (void)a; (void)b; (void)index; *status = 0; return OK; }
API int nvmlDeviceGetTopologyCommonAncestor(struct device *a, struct device *b, int *level) { (void)a; (void)b; *level = 30; return OK; }
struct fabric { /* nvmlGpuFabricInfo_v2_t, without its last field */
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state; /* 0: this device is in no fabric */
};
API int nvmlDeviceGetGpuFabricInfoV(struct device *d, struct fabric *f) {
  (void)d;
  memset(f->cluster, 0, sizeof f->cluster);
  f->status = 0;
  f->clique = 0;
  f->state = 0;
  return OK;
}
