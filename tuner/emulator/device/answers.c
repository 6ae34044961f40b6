/* Answers to what a kernel would have left in device memory.
 *
 * Operators whose output's size depends on values (nonzero, boolean masks, unique, ...) launch
 * kernels that count, and copy the count to the host. Nothing was launched, so there is nothing
 * to copy; but who computes integers for real (inside/values.py) knows the count. It leaves the
 * count here before it calls the operator, and the copy to the host of that many bytes reads it.
 * So PyTorch's own code goes on with the right size, and takes the temporaries that it always takes.
 *
 * Answers belong to a thread; a copy takes the first that has its size. */
#include "device.h"

#include <string.h>

#define MOST 64
#define WIDEST 8

static __thread struct { size_t size; char bytes[WIDEST]; } answers[MOST];
static __thread unsigned count;

/* 0, or -1 where it is too wide or there are too many. */
EMU_EXPORT int emu_answer(const void *bytes, size_t size) {
  if (size == 0 || size > WIDEST || count == MOST) return -1;
  answers[count].size = size;
  memcpy(answers[count].bytes, bytes, size);
  count++;
  return 0;
}

/* Drops all; returns how many were not taken. */
EMU_EXPORT int emu_forget_answers(void) {
  int left = 0;
  for (unsigned i = 0; i < count; i++) left += answers[i].size != 0;
  count = 0;
  return left;
}

/* 1 if `to` has been written. */
static int take_answer(void *to, size_t size) {
  for (unsigned i = 0; i < count; i++) {
    if (answers[i].size != size) continue;
    memcpy(to, answers[i].bytes, size);
    answers[i].size = 0; /* taken */
    return 1;
  }
  return 0;
}

/* Who says whether what a copy to the host would read is there (inside/readbacks.py). */
static emu_reader reader;
EMU_EXPORT void emu_set_reader(emu_reader one) { __atomic_store_n(&reader, one, __ATOMIC_RELEASE); }

#define KEPT (1u << 20)          /* copies up to here are made; larger ones are of floats and dropped */
#define KEPT_TO_HOST (64u << 20) /* what a program reads it may look at */

int emu_copy_rows(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                  size_t height) {
  size_t size = width * height;
  int reads = !emu_is_device_pointer(to);
  if (reads && size && emu_is_device_pointer(from)) {
    if (height == 1 && take_answer(to, size)) return 0;
    emu_reader ask = __atomic_load_n(&reader, __ATOMIC_ACQUIRE);
    if (ask && !ask(to, from, (height - 1) * from_pitch + width)) return -1;
  }
  if (size > (reads ? KEPT_TO_HOST : KEPT)) return 0;
  for (size_t row = 0; row < height; row++)
    memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
  return 0;
}
