/* Preloaded into every process of an emulated program. A program may set PYTHONPATH for what it
   starts (`PYTHONPATH=src python train.py` in a shell script); the emulator's folder stays first. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

__attribute__((constructor)) static void keep_first_on_path(void) {
  const char *ours = getenv("TUNER_EMULATOR_PATH");
  const char *theirs = getenv("PYTHONPATH");
  if (ours == NULL) return;
  size_t length = strlen(ours);
  if (theirs == NULL || *theirs == '\0') {
    setenv("PYTHONPATH", ours, 1);
  } else if (strncmp(theirs, ours, length) != 0 || (theirs[length] != ':' && theirs[length])) {
    char *both = malloc(length + strlen(theirs) + 2);
    if (both == NULL) return;
    sprintf(both, "%s:%s", ours, theirs);
    setenv("PYTHONPATH", both, 1);
    free(both);
  }
}

static int note_library(struct dl_phdr_info *info, size_t size, void *found) {
  if (strstr(info->dlpi_name, "libtorch_cuda.so")) *(int *)found |= 1;
  if (strstr(info->dlpi_name, "libtuner_device.so")) *(int *)found |= 2;
  return 0;
}

/* A process that loaded PyTorch's CUDA libraries without the emulator's has left it: it was started
   by `python -I`, which ignores PYTHONPATH. */
__attribute__((destructor)) static void tell_who_left(void) {
  int found = 0;
  const char *events = getenv("TUNER_EMULATOR_EVENTS");
  if (events == NULL) return;
  dl_iterate_phdr(note_library, &found);
  int file = found == 1 ? open(events, O_WRONLY | O_APPEND | O_CLOEXEC) : -1;
  if (file < 0) return;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  dprintf(file, "{\"event\": \"left\", \"pid\": %d, \"rank\": \"0\", \"at_ns\": %lld}\n", getpid(),
          now.tv_sec * 1000000000ll + now.tv_nsec);
  close(file);
}
