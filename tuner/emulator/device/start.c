/* Preloaded into every process of an emulated program. A program may set PYTHONPATH for what it
   starts (`PYTHONPATH=src python train.py` in a shell script); the emulator's folder stays first. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
