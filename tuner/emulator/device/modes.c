/* PyTorch's question whether a dispatch mode is at work.
 *
 * Where one is, PyTorch takes other paths, so that modes see operators that can be taken apart:
 * gradients that meet in the backward pass are added out of place, and so are attention's masks
 * to its scores. The emulator is a mode itself, and a program on a GPU has none: libtorch_cpu,
 * which asks for such reasons, gets an answer that leaves it out. libtorch_python, which asks in
 * order to call the modes, gets the true one. This function stands before libc10's own for both, as
 * this library has been loaded before them for all to see. */
#define _GNU_SOURCE
#include "device.h"

#include <dlfcn.h>
#include <link.h>
#include <stdbool.h>
#include <string.h>

/* c10::impl::dispatch_mode_enabled() and c10::impl::TorchDispatchModeTLS::stack_len() */
#define ENABLED _ZN3c104impl21dispatch_mode_enabledEv
#define STACK_LENGTH "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv"
#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

static struct {
  bool (*enabled)(void);
  int64_t (*stack_length)(void);
  uintptr_t first, last; /* addresses of libtorch_cpu */
} torch;

static int note_addresses(struct dl_phdr_info *library, size_t size, void *unused) {
  (void)size, (void)unused;
  const char *name = strrchr(library->dlpi_name, '/');
  if (strcmp(name == NULL ? library->dlpi_name : name + 1, "libtorch_cpu.so") != 0) return 0;
  uintptr_t last = 0;
  for (int i = 0; i < library->dlpi_phnum; i++) {
    uintptr_t end = library->dlpi_phdr[i].p_vaddr + library->dlpi_phdr[i].p_memsz;
    if (library->dlpi_phdr[i].p_type == PT_LOAD && end > last) last = end;
  }
  torch.first = library->dlpi_addr;
  torch.last = library->dlpi_addr + last;
  return 1;
}

static void find(void) {
  void *c10 = dlopen("libc10.so", RTLD_NOW | RTLD_NOLOAD);
  if (c10 == NULL) return;
  dl_iterate_phdr(note_addresses, NULL);
  torch.stack_length = (int64_t (*)(void))dlsym(c10, STACK_LENGTH);
  bool (*enabled)(void) = (bool (*)(void))dlsym(c10, TEXT(ENABLED));
  __atomic_store_n(&torch.enabled, enabled, __ATOMIC_RELEASE);
}

EMU_EXPORT bool ENABLED(void) {
  uintptr_t caller = (uintptr_t)__builtin_return_address(0);
  bool (*enabled)(void) = __atomic_load_n(&torch.enabled, __ATOMIC_ACQUIRE);
  if (enabled == NULL) {
    find();
    enabled = torch.enabled;
  }
  if (enabled == NULL || !enabled()) return false;
  bool leaves_out = caller >= torch.first && caller < torch.last && torch.stack_length != NULL;
  return leaves_out ? torch.stack_length() > 1 : true;
}
