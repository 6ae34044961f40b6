/* For which architectures the kernels of a registered fat binary were compiled.
 *
 * Code asks cudaFuncGetAttributes which of its variants runs, and takes a refusal where the answer is
 * none of those that it was compiled for (CUB does: a binary without 8.9 runs its 8.6 on one). */
#ifndef TUNER_FATBINARY_H
#define TUNER_FATBINARY_H

#include <stdint.h>
#include <string.h>

/* fatbinary_section.h of the toolkit, and what a fat binary begins with. */
struct fat_wrapper { int magic, version; const unsigned char *data; void *rest; };
struct fat_header { uint32_t magic; uint16_t version, header_size; uint64_t size; };
struct fat_entry {
  uint16_t kind, version; /* kind 1: PTX, 2: code for one architecture */
  uint32_t header_size;
  uint64_t size;
  uint32_t compressed, options;
  uint16_t minor, major;
  uint32_t architecture; /* 86 for 8.6 */
};
#define FAT_WRAPPER_MAGIC 0x466243b1
#define FAT_MAGIC 0xba55ed50u

/* The architecture of the code that a device of `wanted` (89 for 8.9) runs; `wanted` itself where the
 * binary does not say, and 0 where it has nothing for it. */
static int architecture_that_runs(const void *binary, int wanted) {
  const struct fat_wrapper *wrapper = binary;
  if (!wrapper || wrapper->magic != FAT_WRAPPER_MAGIC || !wrapper->data) return wanted;
  struct fat_header header;
  memcpy(&header, wrapper->data, sizeof header);
  if (header.magic != FAT_MAGIC) return wanted;
  const unsigned char *at = wrapper->data + header.header_size, *end = at + header.size;
  int code = 0, ptx = 0, others = 0;
  while (at + sizeof(struct fat_entry) <= end) {
    struct fat_entry entry;
    memcpy(&entry, at, sizeof entry);
    int found = (int)entry.architecture;
    /* Code runs within its generation, PTX on everything newer. */
    if (found <= wanted) {
      if (entry.kind == 2 && found / 10 == wanted / 10 && found > code) code = found;
      if (entry.kind == 1 && found > ptx) ptx = found;
    }
    others |= entry.kind == 2;
    if (!entry.header_size) break;
    at += entry.header_size + entry.size;
  }
  return code ? code : ptx ? ptx : others ? 0 : wanted;
}

#endif
