/* Answers to what a kernel would have left in device memory.
 *
 * Operators whose output's size depends on values (nonzero, boolean masks, unique, ...) launch
 * kernels that count, and copy the count to the host. Nothing was launched, so there is nothing
 * to copy; but who computes integers for real (inside/values.py) knows the count. It leaves the
 * count here before it calls the operator, and the copy to the host of that many bytes reads it.
 * So PyTorch's own code goes on with the right size, and takes the temporaries that it always takes.
 *
 * Answers belong to a thread and are taken in order; one is taken only by a copy of its size. */
#include "device.h"

#include <string.h>

#define MOST 64
#define WIDEST 8

static __thread struct { size_t size; char bytes[WIDEST]; } answers[MOST];
static __thread unsigned first, after;

/* 0, or -1 where it is too wide or there are too many. */
EMU_EXPORT int emu_answer(const void *bytes, size_t size) {
  if (size > WIDEST || after == MOST) return -1;
  answers[after].size = size;
  memcpy(answers[after].bytes, bytes, size);
  after++;
  return 0;
}

/* Drops what is left; returns how many there were. */
EMU_EXPORT int emu_forget_answers(void) {
  int left = (int)(after - first);
  first = after = 0;
  return left;
}

/* For the copies from device to host: 1 if `to` has been written. */
EMU_EXPORT int emu_take_answer(void *to, size_t size) {
  if (first == after || answers[first].size != size) return 0;
  memcpy(to, answers[first].bytes, size);
  first++;
  return 1;
}
